"""The worker's side: when reboot is available, and what the user is told when it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_tft.agent import reboot

CODE = "import os; from mindspeed_tft.agent import reboot; print(reboot.why_not(os.environ)); "
MARK = "reboot.mark_rebootable(os.environ); print(os.getpid()); "


def launched(directory: Path, code: str, *, agent: int | None = None, session: bool = True, shell: bool = False) -> str:
    """The output of a worker that this process starts as a launcher does."""
    command = [sys.executable, "-c", code]
    found = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", *command] if shell else command,
        env={
            **os.environ,
            reboot.ENV_DIRECTORY: str(directory),
            reboot.ENV_AGENT: str(agent or os.getpid()),
            reboot.ENV_LOCAL_RANK: "3",
        },
        start_new_session=session,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_under_a_plain_launcher_the_user_reads_what_to_do() -> None:
    assert not reboot.available({}) and reboot.lives({}) == 0
    text = reboot.why_not({})
    assert text.startswith("reboot is not available because ")
    assert text.endswith("; start with tftrun, or torchrun --logs-specs mindspeed_tft")
    with pytest.raises(RuntimeError, match="start with tftrun"):
        reboot.mark_rebootable({})
    reboot.unmark({})


@pytest.mark.parametrize("shell", [False, True])
def test_a_worker_marks_itself(tmp_path: Path, shell: bool) -> None:
    pid = launched(tmp_path, CODE + MARK, shell=shell)
    assert reboot.mark_of(tmp_path, 3).read_text() == pid
    assert [path.name for path in tmp_path.iterdir()] == ["rebootable-3"], "nothing half written stays"
    launched(tmp_path, CODE + MARK + "reboot.unmark(os.environ); reboot.unmark(os.environ)")
    assert not list(tmp_path.iterdir())


def test_inherited_variables_are_not_believed(tmp_path: Path) -> None:
    assert "was not started by the launcher" in launched(tmp_path, CODE, agent=os.getppid())
    assert "was not started by the launcher" in launched(tmp_path, CODE, session=False)
    assert "is gone" in launched(tmp_path / "removed", CODE)
