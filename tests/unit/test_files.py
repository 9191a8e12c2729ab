"""Dump files: never half a checkpoint, never a damaged one, the older one untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_tft.recovery import files

STEP = 7


def dump(base: Path, content: bytes = b"state" * 1000) -> tuple[Path, Path]:
    directory = base / ".attempt"
    checkpoint = directory / "iter_0000007"
    path = checkpoint / "mp_rank_00" / "model.pt"
    sha = files.write_verified(path, lambda file: file.write(content))
    files.write_fragment(directory, "tp0-pp0", checkpoint, {path: sha})
    return directory, checkpoint


def publish(base: Path, directory: Path, checkpoint: Path) -> Path:
    final = base / "iter_0000007"
    files.publish(directory, checkpoint, final, base / "latest.txt", STEP, ["tp0-pp0"], {"written_by": "test"})
    return final


def test_a_published_dump_verifies_and_is_named_last(tmp_path: Path) -> None:
    final = publish(tmp_path, *dump(tmp_path))
    assert (tmp_path / "latest.txt").read_text() == "7"
    manifest = files.verify_checkpoint(final)
    assert manifest["step"] == STEP and list(manifest["files"]) == ["mp_rank_00/model.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000007", "latest.txt"]


def test_one_flipped_byte_is_caught(tmp_path: Path) -> None:
    final = publish(tmp_path, *dump(tmp_path))
    path = final / "mp_rank_00" / "model.pt"
    data = bytearray(path.read_bytes())
    data[1234] ^= 1
    path.write_bytes(data)
    with pytest.raises(files.DumpError, match="sha256"):
        files.verify_checkpoint(final)


@pytest.mark.parametrize("damage", ["truncate", "extra", "missing part"])
def test_what_its_writer_did_not_state_is_not_published(tmp_path: Path, damage: str) -> None:
    directory, checkpoint = dump(tmp_path)
    if damage == "truncate":
        os.truncate(checkpoint / "mp_rank_00" / "model.pt", 10)
    elif damage == "extra":
        (checkpoint / "stray.pt").write_bytes(b"x")
    else:
        files.fragment(directory, "tp0-pp0").unlink()
    with pytest.raises(files.DumpError):
        publish(tmp_path, directory, checkpoint)
    assert not (tmp_path / "iter_0000007").exists() and not (tmp_path / "latest.txt").exists()


def test_an_interrupted_save_of_the_same_step_is_kept_aside(tmp_path: Path) -> None:
    stale = tmp_path / "iter_0000007" / "half.pt"
    stale.parent.mkdir()
    stale.write_bytes(b"half")
    final = publish(tmp_path, *dump(tmp_path))
    files.verify_checkpoint(final)
    assert (tmp_path / "iter_0000007.incomplete-0" / "half.pt").read_bytes() == b"half"


def test_a_full_disk_is_a_clear_error_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """A real ENOSPC: the child's file size limit ends the write in the middle (EFBIG takes the same way out)."""
    older = publish(tmp_path, *dump(tmp_path))
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    code = (
        "import resource, signal, sys; from pathlib import Path; from mindspeed_tft.recovery import files\n"
        "import torch\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n"
        "try: files.write_verified(Path(sys.argv[1]), lambda f: torch.save(torch.zeros(100000), f))\n"
        "except files.DumpError as exc: print('refused:', exc); sys.exit(0)\n"
        "sys.exit(1)\n"
    )
    target = tmp_path / ".attempt-2" / "model.pt"
    done = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot write" in done.stdout and "File too large" in done.stdout
    assert {path: path.read_bytes() for path in before} == before
    files.verify_checkpoint(older)


def test_a_symlinked_directory_works(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    final = publish(link, *dump(link))
    files.verify_checkpoint(final)
    assert json.loads((real / "iter_0000007" / files.MANIFEST).read_text())["step"] == STEP


def test_discard_removes_everything_and_may_be_repeated(tmp_path: Path) -> None:
    directory, _ = dump(tmp_path)
    files.discard(directory)
    files.discard(directory)
    assert list(tmp_path.iterdir()) == []


def test_a_stamped_file_reads_as_written_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "pieces" / "tp0-pp0"
    files.write_stamped(path, lambda file: file.write(b"piece"))
    assert files.read_stamped(path) == b"piece"
    path.write_bytes(b"peace")
    with pytest.raises(files.DumpError, match="its writer stated"):
        files.read_stamped(path)
    path.unlink()
    with pytest.raises(files.DumpError, match="cannot read"):
        files.read_stamped(path)
