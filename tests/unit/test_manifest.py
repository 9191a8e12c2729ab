"""A dump that is about to be loaded: which file is not what was written, found by whom, and in which words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tft.recovery import files, manifest
from mindspeed_tft.recovery.files import DumpError
from mindspeed_tft.recovery.manifest import Stated


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A published dump of three files."""
    directory, final = tmp_path / ".tft-dump-x", tmp_path / "iter_0000007"
    checkpoint = directory / "iter_0000007"
    for part in ("tp0", "tp1", "tp2"):
        path = checkpoint / part / "model.pt"
        sha = files.write_verified(path, lambda file, part=part: file.write(part.encode() * 1000))  # type: ignore[misc]
        files.write_fragment(directory, part, checkpoint, {path: sha})
    files.publish(directory, checkpoint, final, tmp_path / "latest.txt", 7, ["tp0", "tp1", "tp2"], {})
    return final


def wrong(checkpoint: Path, ranks: int = 2) -> list[int | None]:
    stated = manifest.read(checkpoint)
    return [manifest.first_wrong(checkpoint, stated, rank, ranks) for rank in range(ranks)]


def test_a_whole_dump_is_loaded(dump: Path) -> None:
    assert list(manifest.read(dump)) == ["tp0/model.pt", "tp1/model.pt", "tp2/model.pt"]
    assert wrong(dump, 1) == [None]
    assert wrong(dump, 8) == [None] * 8


@pytest.mark.parametrize("file", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_flipped_bit_of_a_file_is_found_by_one_rank(dump: Path, file: int, ranks: int) -> None:
    path = dump / f"tp{file}" / "model.pt"
    content = bytearray(path.read_bytes())
    content[1234] ^= 1 << 3
    path.write_bytes(content)
    assert sorted(found for found in wrong(dump, ranks) if found is not None) == [file]
    words = manifest.refusal(dump, f"tp{file}/model.pt", manifest.read(dump)[f"tp{file}/model.pt"])
    assert words.startswith(f"{path} is not what the dump wrote: it has sha256 ")
    assert "--ckpt-step" in words


def test_a_file_that_is_gone_or_cut_is_named(dump: Path) -> None:
    (dump / "tp1" / "model.pt").unlink()
    (dump / "tp2" / "model.pt").write_bytes(b"tp2")
    assert wrong(dump, 1) == [1]
    stated = manifest.read(dump)
    assert "it cannot be read (No such file" in manifest.refusal(dump, "tp1/model.pt", stated["tp1/model.pt"])
    assert "it has 3 bytes, and was written with 3000" in manifest.why_wrong(
        dump, "tp2/model.pt", stated["tp2/model.pt"]
    )


def test_files_that_the_dump_did_not_write_are_nobodys_business(dump: Path) -> None:
    (dump / "notes.txt").write_text("mine")
    assert wrong(dump) == [None, None]


def test_a_checkpoint_of_megatron_has_no_manifest(tmp_path: Path) -> None:
    assert manifest.read(tmp_path) == {}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": 3}', json.dumps({"files": {"a": {"bytes": 3}}})])
def test_a_manifest_that_says_nothing_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / files.MANIFEST).write_text(content)
    with pytest.raises(DumpError, match=rf"{files.MANIFEST} cannot be read"):
        manifest.read(tmp_path)


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_every_file_is_read_once_and_the_work_is_even(sizes: list[int], ranks: int) -> None:
    stated = {f"f{number}": Stated("", size) for number, size in enumerate(sizes)}
    shares = [manifest.share(stated, rank, ranks) for rank in range(ranks)]
    assert sorted(name for names in shares for name in names) == sorted(stated)
    loads = [sum(stated[name].size + 1 for name in names) for names in shares]
    assert max(loads) - min(loads) <= max((size + 1 for size in sizes), default=0)


@pytest.mark.parametrize(("younger", "over"), [((), False), (("tp0",), False), (("tp0", "tp1", "tp2"), True)])
def test_a_dump_that_megatron_saved_over_is_no_dump_any_more(dump: Path, younger: tuple[str, ...], over: bool) -> None:
    """All files are younger than the manifest then. One alone was changed by somebody, and is judged."""
    later = (dump / files.MANIFEST).stat().st_mtime + 10
    for part in younger:
        os.utime(dump / part / "model.pt", (later, later))
    assert manifest.written_over(dump, manifest.read(dump)) is over


def test_of_a_distributed_checkpoint_the_index_tells(dump: Path) -> None:
    later = (dump / files.MANIFEST).stat().st_mtime + 10
    (dump / ".metadata").write_text("index")
    stated = {**manifest.read(dump), ".metadata": Stated("", 5)}
    os.utime(dump / ".metadata", (later - 20, later - 20))
    assert not manifest.written_over(dump, stated)
    os.utime(dump / ".metadata", (later, later))
    assert manifest.written_over(dump, stated)
