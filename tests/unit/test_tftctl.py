"""`tftctl` as a whole: every command says how it ends, its page is up to date, and shells complete it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def pages(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tftctl_page", root / "scripts" / "tftctl_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(pages: ModuleType, root: Path) -> None:
    assert (root / "docs" / "tftctl.md").read_text() == pages.page(), "run python scripts/tftctl_page.py"


def test_every_command_says_how_it_ends_and_speaks_json(pages: ModuleType) -> None:
    found = {command.name: command for command in pages.commands()}
    assert {"status", "pause", "resume", "dump", "drill", "explain", "switch-link", "switch-back", "patches", "config",
            "doctor", "certs init", "certs node", "certs check", "certs rotate"} <= set(found)  # fmt: skip
    for name, command in found.items():
        assert pages.exit_status(command.help) or pages.exit_status(command.group), f"{name}: no exit status"
        words = [word for parameter in command.parameters() for word in parameter.words]
        assert "--json" in words or name == "demo", name
        assert all(parameter.info.help or parameter.info.metavar for parameter in command.parameters()), name


def test_what_commands_printed_is_of_commands_that_exist(pages: ModuleType) -> None:
    names = {command.name.replace(" ", "-"): command for command in pages.commands()}
    printed = sorted(pages.PRINTED.glob("*.txt"))
    assert printed
    for path in printed:
        command = names[path.stem]
        first = path.read_text().splitlines()[0]
        assert first.startswith(f"$ tftctl {command.name}"), path
        known = {word for parameter in command.parameters() for word in parameter.words}
        own = first.partition(" -- ")[0].split()
        assert {word for word in own if word.startswith("--")} <= known, path


def complete(words: str) -> list[str]:
    """What bash would be offered for the last word."""
    environ = {
        **os.environ,
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_TFTCTL_COMPLETE": "complete_bash",
    }
    command = [str(Path(sys.executable).with_name("tftctl"))]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30).stdout.split()


def test_a_shell_completes() -> None:
    assert complete("tftctl doctor --rend") == ["--rendezvous"]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion_installs_itself(tmp_path: Path) -> None:
    assert complete("tftctl doc") == ["doctor"] and complete("tftctl certs ro") == ["rotate"]
    environ = {**os.environ, "HOME": str(tmp_path)}
    script = f"'{Path(sys.executable).with_name('tftctl')}' --install-completion"
    done = subprocess.run(["bash", "-c", f"{script}; exit $?"], env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    (installed,) = (tmp_path / ".bash_completions").iterdir()
    assert "complete -o default -F _tftctl_completion tftctl" in installed.read_text()
    assert str(installed) in (tmp_path / ".bashrc").read_text()
