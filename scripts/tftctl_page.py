"""Write `docs/tftctl.md` from the commands themselves: usage, options, exit status, and what some of them print.

python scripts/tftctl_page.py            write the page
python scripts/tftctl_page.py --print    print it
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from mindspeed_tft.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tftctl.md"
PRINTED = ROOT / "scripts" / "printed"  # what a command printed once: `doctor.txt`, whose first line is the command

# More about some commands, and what they print where that changes from job to job.
SEE = {
    "status": "[operate.md](operate.md)",
    "pause": "[operate.md](operate.md)",
    "resume": "[operate.md](operate.md)",
    "dump": "[operate.md](operate.md)",
    "switch-link": "[link-switch.md](link-switch.md)",
    "switch-back": "[link-switch.md](link-switch.md)",
    "explain": "[incidents.md](incidents.md)",
    "certs": "[security.md](security.md)",
    "config": "[flags.md](flags.md)",
    "doctor": "[doctor.md](doctor.md)",
}

_HEAD = """\
# tftctl

<!-- written by scripts/tftctl_page.py from the commands; a test compares the two -->

The operator's command, on any host where the package is installed. `tftctl COMMAND --help` says what is here, too.
Flags of the training program follow after `--`. What is coloured on a terminal is plain text elsewhere, and nearly
every command has `--json` for programs.

## Completion

`tftctl --install-completion` teaches your shell (bash, zsh, fish) to complete commands and options. With
`tftctl --show-completion` you see what it would add, to put it into a file of your own. A new shell has it.

"""
_EVERYWHERE = """
With every command: 2 for arguments that cannot be, with the argument and what would be right on stderr; 143 when it is
ended by SIGTERM, 130 by Ctrl-C. What a training rank ends with (75, 76, 77) is in
[dump.md](dump.md#exit-statuses-of-a-rank).
"""


@dataclass(frozen=True)
class Command:
    """One command, as its function declares it; which parser typer makes of that is typer's affair."""

    name: str
    function: Callable[..., None]
    group: str = ""  # help of its group

    @property
    def help(self) -> str:
        return inspect.getdoc(self.function) or ""

    def parameters(self) -> Iterator[Parameter]:
        hints = get_type_hints(self.function, include_extras=True)
        for name, found in inspect.signature(self.function).parameters.items():
            for info in getattr(hints[name], "__metadata__", ()):
                if isinstance(info, (OptionInfo, ArgumentInfo)) and not info.hidden:
                    yield Parameter(name, found.default, hints[name].__origin__, info)


@dataclass(frozen=True)
class Parameter:
    """One option or argument."""

    name: str
    default: Any
    kind: Any  # its type
    info: OptionInfo | ArgumentInfo

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def value(self) -> str:
        """What stands for its value."""
        if self.info.metavar or self.is_switch:
            return self.info.metavar or ""
        if isinstance(self.info, ArgumentInfo):
            return self.name.upper()
        words = {int: "N", float: "X"}
        return next((word for kind, word in words.items() if kind in (self.kind, *get_args(self.kind))), "TEXT")

    @property
    def words(self) -> list[str]:
        """All spellings of an option."""
        # typer takes the first one for a default, until it sees that there is one elsewhere.
        declared = (self.info.default, *(self.info.param_decls or ()))
        given = [word for word in declared if isinstance(word, str) and word.startswith("-")]
        plain = self.name.replace("_", "-")
        spelled = given or ([f"--{plain}", f"--no-{plain}"] if self.is_switch else [f"--{plain}"])
        return [word for both in spelled for word in both.split("/")]


def commands(of: typer.Typer = app, above: str = "", group: str = "") -> Iterator[Command]:
    """All commands, those of groups with the name of their group."""
    for info in of.registered_commands:
        assert info.callback is not None
        yield Command(f"{above} {info.name or info.callback.__name__}".strip(), info.callback, group)
    for child in of.registered_groups:
        assert child.typer_instance is not None
        inner = child.typer_instance.info
        yield from commands(child.typer_instance, f"{above} {child.name or inner.name}".strip(), str(inner.help or ""))


def exit_status(text: str) -> str:
    """What a help says after "Exit status:"; "" where it says nothing."""
    return _line(text).partition("Exit status: ")[2].rstrip(".")


def page() -> str:
    found = list(commands())
    text = _HEAD + "## Exit status\n\n| command | exit status |\n|---|---|\n"
    for command in found:
        status = exit_status(command.help) or exit_status(command.group).partition(";")[0]
        text += f"| [`tftctl {command.name}`](#{_anchor(command.name)}) | {_cell(status)} |\n"
    return text + _EVERYWHERE + "".join(map(_section, found))


def _section(command: Command) -> str:
    paragraphs = command.help.partition("Exit status:")[0].strip().split("\n\n")
    parameters = list(command.parameters())
    values = [each.value for each in parameters if isinstance(each.info, ArgumentInfo)]
    text = f"\n## tftctl {command.name}\n\n"
    text += "\n\n".join(_escape(_line(paragraph)) for paragraph in paragraphs) + "\n"
    text += f"\n```\n{' '.join(['tftctl', command.name, *(['[OPTIONS]'] if parameters else []), *values])}\n```\n"
    if parameters:
        text += "\n| option | default | meaning |\n|---|---|---|\n" + "".join(map(_row, parameters))
    see = SEE.get(command.name) or SEE.get(command.name.split()[0])
    if see:
        text += f"\nMore: {see}.\n"
    printed = PRINTED / f"{command.name.replace(' ', '-')}.txt"
    if printed.is_file():
        text += f"\n```\n{printed.read_text().rstrip()}\n```\n"
    return text


def _row(parameter: Parameter) -> str:
    if isinstance(parameter.info, ArgumentInfo):
        name = f"`{parameter.value}`"
    else:
        name = ", ".join(f"`{word}`" for word in parameter.words) + (f" `{parameter.value}`" if parameter.value else "")
    default = parameter.default
    if default in (None, False, inspect.Parameter.empty):
        shown = ""
    else:
        shown = f"`{parameter.words[0] if default is True else default}`"
    return f"| {_cell(name)} | {shown} | {_cell(_escape(parameter.info.help or ''))} |\n"


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _escape(text: str) -> str:
    """Words of a help that Markdown would read otherwise."""
    return re.sub(r"(?<!`)<(?![ =])", "&lt;", text)


def _anchor(name: str) -> str:
    return f"tftctl-{name.replace(' ', '-')}"


def main() -> None:
    if "--print" in sys.argv[1:]:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
