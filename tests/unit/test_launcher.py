"""The resume command, and the time that launchers leave to survivors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_tft.agent import tftrun
from mindspeed_tft.recovery import launcher
from mindspeed_tft.settings import Settings, build


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["torchrun", "train.py", "--lr", "1"], ["torchrun", "train.py", "--lr", "1", "--load", "/ckpt"]),
        (["train.py", "--load", "old", "--lr", "1"], ["train.py", "--lr", "1", "--load", "/ckpt"]),
        (["train.py", "--load=old", "--x"], ["train.py", "--x", "--load", "/ckpt"]),
        (["t.py", "--ckpt-step", "4", "--finetune", "--x", "1"], ["t.py", "--x", "1", "--load", "/ckpt"]),
        (["t.py", "--ckpt-step=4", "--no-load-optim", "--x"], ["t.py", "--x", "--load", "/ckpt"]),
    ],
)
def test_the_resume_command_loads_from_save(words: list[str], expected: list[str]) -> None:
    assert launcher.with_load(words, "/ckpt") == expected


def test_patience_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launcher.ENV_SHUTDOWN, raising=False)
    assert launcher.patience(["torchrun", "x.py"]) == 30
    # torch itself asks for so long where a signal came, not where a worker failed.
    assert launcher.patience(["torchrun", "--shutdown-timeout", "99", "x.py"]) == 30
    assert launcher.patience(["torchrun", "--shutdown-timeout", "9", "x.py"]) == 9
    ours = ["torchrun", "--logs-specs", "mindspeed_tft"]
    assert launcher.patience([*ours, "--shutdown-timeout", "99", "x.py"]) == 99
    assert launcher.patience(["torchrun", "--logs_specs=mindspeed_tft", "--shutdown_timeout=99", "x.py"]) == 99
    assert launcher.patience([*ours, "x.py"]) == 30
    assert launcher.patience(["torchrun", "--shutdown-timeout", "99", "-m", "mindspeed_tft.faults.gpt_job"]) == 30
    assert launcher.patience(["python", "-m", "mindspeed_tft.agent.tftrun", "x.py"]) is None
    assert launcher.patience([]) is None
    monkeypatch.setenv(launcher.ENV_SHUTDOWN, "45")
    assert launcher.patience([*ours, "x.py"]) == 45


def test_a_job_says_what_its_launcher_leaves_of_the_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mindspeed_tft import runtime

    monkeypatch.delenv(launcher.ENV_SHUTDOWN, raising=False)
    monkeypatch.setattr(launcher, "words", lambda: ["torchrun", "x.py"])
    runtime._warn_of_patience(Settings())
    assert "after 30 s, so all deadlines end before that, not at --tft-deadline 120" in capsys.readouterr().out
    monkeypatch.setattr(launcher, "words", lambda: ["torchrun", "--shutdown-timeout", "5", "x.py"])
    runtime._warn_of_patience(Settings())
    told = capsys.readouterr().out
    assert "all deadlines end before that" not in told, "the shortest deadline is longer"
    assert "after 5 s, less than the 10 s" in told and "may be killed before they have saved" in told
    monkeypatch.setattr(launcher, "words", lambda: ["tftrun", "x.py"])
    runtime._warn_of_patience(Settings())
    assert capsys.readouterr().out == ""


def test_a_job_whose_dump_would_be_cut_off_is_refused_before_it_patches_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mindspeed_tft import runtime

    monkeypatch.delenv(launcher.ENV_SHUTDOWN, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launcher, "words", lambda: ["torchrun", "x.py"])
    monkeypatch.setattr(runtime.REGISTRY, "activate", lambda *_: pytest.fail("patched"))
    found, origin = build([("environment TTP_OT", {"tft_dump_seconds": 20}), ("flag", {"enable_worker_reboot": True})])
    with pytest.raises(SystemExit) as left:
        runtime.enable(found, origin)
    assert left.value.code == 2 and runtime.settings() is None
    assert "mindspeed_tft: error: TTP_OT: a dump of 20 s does not fit" in capsys.readouterr().err


def test_tftrun_leaves_what_the_deadline_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TTP_OT", "HIGH_AVAILABILITY"):
        monkeypatch.delenv(name, raising=False)
    assert tftrun.shutdown_seconds(tftrun.settings_of(["--num-layers", "2"])) == 125
    assert tftrun.shutdown_seconds(tftrun.settings_of(["--tft-deadline", "600", "--lr", "1"])) == 605


def test_tftrun_runs_a_program_and_keeps_its_exit_status(tmp_path: Path) -> None:
    """One real launch: torchrun's arguments pass through, and the launcher's limit is raised."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "line = f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\"\n"
        "os.write(1, line.encode())\n"  # at once: the other rank writes to the same pipe
        "sys.exit(3 if '--fail' in sys.argv else 0)\n"
    )
    for words, status in (([], 0), (["--fail"], 1), (["--tft-deadline", "1"], 2)):
        command = [sys.executable, "-m", "mindspeed_tft.agent.tftrun", "--nproc-per-node", "2", str(program), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        if status == 0:  # in a failing job one rank may be ended before it prints
            assert done.stdout.count("of 2") == 2
        if status == 2:
            assert done.stderr.startswith("tftrun: error: --tft-deadline")


@pytest.mark.parametrize(
    ("words", "before", "after"),
    [
        (["--lr", "1"], {}, {}),
        (["--enable-high-availability", "--enable-worker-reboot"], {}, {"TFT_WARM_STANDBY": "1"}),
        (["--enable-high-availability", "--enable-worker-reboot", "--no-tft-warm-standby"], {}, {}),
        (
            ["--enable-high-availability", "--enable-worker-reboot"],
            {"TFT_WARM_STANDBY": "0"},
            {"TFT_WARM_STANDBY": "0"},
        ),
        (["--tft-config", "recover"], {}, {"TFT_WARM_STANDBY": "1"}),
    ],
)
def test_a_standby_is_kept_where_the_job_can_use_one(
    words: list[str], before: dict[str, str], after: dict[str, str]
) -> None:
    tftrun.want_standby(tftrun.settings_of(words), before)
    assert before == after
