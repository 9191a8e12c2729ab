"""Where the control processes of a host meet, and who may not get there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from control_support import DEADLINES, config, until

from mindspeed_tft.control import candidates, launch
from mindspeed_tft.control import config as module
from mindspeed_tft.control.candidates import RoleFile
from mindspeed_tft.control.config import ControlConfig, ControlRefused, ControlUnavailable, make_private


def test_a_config_comes_back_from_json(tmp_path: Path) -> None:
    deadlines = replace(DEADLINES, reboot=7.5)
    cfg = config(tmp_path, 4, port=1234, tls_dir="/certs", deadlines=deadlines, strategies=("dump", "recover"))
    assert ControlConfig.from_json(cfg.to_json()) == cfg


def test_what_torchrun_says_is_taken() -> None:
    env = {
        "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2",
    }  # fmt: skip
    cfg = ControlConfig.from_env(DEADLINES, "/incidents", env, run_name="llama")
    assert (cfg.world_size, cfg.local_world_size, cfg.node_rank, cfg.nnodes) == (8, 4, 1, 2)
    assert (cfg.run_id, cfg.run_name, cfg.restart, cfg.controller_host) == ("job7", "llama", 2, "node0")
    assert cfg.launcher_pid == os.getppid()
    cfg = ControlConfig.from_env(DEADLINES, "/incidents", {**env, "TTP_ADDR": "10.0.0.1"})
    assert cfg.controller_host == "10.0.0.1"
    alone = ControlConfig.from_env(DEADLINES, "/incidents", {})
    assert (alone.world_size, alone.nnodes, alone.launcher_pid) == (1, 1, 0)


@pytest.mark.parametrize(
    "other", [{"run_id": "b"}, {"master": "x:1"}, {"restart": 1}, {"node_rank": 1}], ids=lambda o: next(iter(o))
)
def test_jobs_that_differ_do_not_meet(tmp_path: Path, other: dict[str, object]) -> None:
    cfg = config(tmp_path)
    base = str(tmp_path)
    short = module.meeting_dir(cfg, "/tmp")
    assert short == module.meeting_dir(replace(cfg, host="x", world_size=9), "/tmp")
    assert short != module.meeting_dir(replace(cfg, **other), "/tmp"), base  # type: ignore[arg-type]


def test_a_path_that_is_too_long_for_a_socket_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    found = module.meeting_dir(config(tmp_path))
    assert not str(found).startswith(str(long))
    assert len(f"{found}/ctl-0123456789ab.sock") < 108
    with pytest.raises(ControlUnavailable, match="TMPDIR"):
        module.meeting_dir(config(tmp_path), str(long))


def test_a_runtime_directory_that_is_not_there_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/no-such-user")
    assert not str(module.meeting_dir(config(tmp_path))).startswith("/run/user/no")


def test_a_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "tft-0" / "abc"
    open_to_all.mkdir(parents=True)
    open_to_all.parent.chmod(0o700)
    open_to_all.chmod(0o755)
    with pytest.raises(ControlRefused, match="not a private directory"):
        module.make_private(open_to_all)


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "tft-0").mkdir(mode=0o700)
    (tmp_path / "tft-0" / "abc").symlink_to(real)
    with pytest.raises(ControlRefused, match="not a private directory"):
        module.make_private(tmp_path / "tft-0" / "abc")


def test_a_private_file_is_private(tmp_path: Path) -> None:
    module.write_private(tmp_path / "file", "text")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes later meets where the job met first, though a login made XDG_RUNTIME_DIR appear in between."""
    later, first = tmp_path / "r", tmp_path / "t"
    first.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(later))
    monkeypatch.setattr(module.tempfile, "tempdir", str(first))
    met = module.meeting_dir(config(tmp_path))
    assert met.is_relative_to(first)
    met.mkdir(parents=True)
    later.mkdir()
    assert module.meeting_dir(config(tmp_path)) == met
    met.rmdir()
    assert module.meeting_dir(config(tmp_path)).is_relative_to(later), "the next job takes the better place"


def test_a_relay_that_is_started_again_finds_the_controllers_that_live(tmp_path: Path) -> None:
    """All ranks of their host died, and the relay ended with the last one. What is left of the dead is removed."""
    directory = tmp_path / "m"
    make_private(directory)
    command = [sys.executable, "-c", "import time; time.sleep(60)", str(directory / "ctl-a.sock")]
    with subprocess.Popen(command) as alive:
        try:
            for index, pid, name in ((0, alive.pid, "ctl-a.sock"), (1, 2**22 + 1, "ctl-b.sock")):
                (directory / name).touch()
                RoleFile(pid, index, 5, index == 0, True, str(directory / name), "").write(directory)
            (directory / "uplink.json").write_text("{}")
            (directory / "config-x.json").write_text("{}")
            until(lambda: b"ctl-a" in Path(f"/proc/{alive.pid}/cmdline").read_bytes(), what="the words of the process")
            launch._sweep(directory, candidates.of_the_living(directory))
            left = {path.name for path in directory.iterdir()}
            assert left == {"controller-0.json", "ctl-a.sock", "uplink.json"}
            launch._sweep(directory, set())
            assert not list(directory.iterdir()), "a new job sweeps everything"
        finally:
            alive.kill()


def test_the_last_one_takes_what_was_kept_along(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    make_private(directory)
    (directory / "uplink.json").write_text("{}")
    candidates.leave(directory)
    assert not directory.exists()
