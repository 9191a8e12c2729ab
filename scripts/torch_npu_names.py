"""Write mindspeed_tft/platforms/torch_npu_names.py, and the table of docs/npu.md: what the releases of torch_npu have
of what the platform calls.

    pip download --no-deps torch_npu==2.7.1 -d WHEELS      (for each release; a wheel is 15 to 45 MB)
    python scripts/torch_npu_names.py WHEELS [--check]

The wheels are read as archives and parsed; nothing of them is installed or imported, because torch_npu does not import
without CANN. Functions of Python are followed through the imports of their modules, with their parameters. Names that
C++ registers (`torch_npu._C`, methods of groups) and functions of CANN are looked for in the binaries, as whole words:
their parameters are not there to be read.

With --check nothing is written, and the exit status says whether the file is what the wheels say.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mindspeed_tft.platforms import npu  # noqa: E402

PAGE = ROOT / "docs" / "npu.md"
BEGIN, END = "<!-- releases: scripts/torch_npu_names.py -->\n", "<!-- end -->"
TARGET = ROOT / "mindspeed_tft" / "platforms" / "torch_npu_names.py"
LIBRARY = re.compile(r"torch_npu/lib/libtorch_npu\.so$|torch_npu/_C\.[^/]*\.so$")

# What C++ registers and torch_npu's own Python reaches for in the calls that we make.
IN_BINARY = (
    *(
        "_npu_restart_device",
        "_npu_stopDevice",
        "_npu_check_uce_in_memory",
        "_npu_stress_detect",
        "_update_npu_data_ptr",
    ),
    *("abort_hccl_comm", "_delete_tcpstore_key", "resume_hccl_comm", "_set_switch_nic_comm", "set_watchdog_status"),
    *("clear_workmeta_list", "recorded_time"),
)


@dataclass
class Release:
    """What one wheel has: parameters by name; `absent` names are in neither."""

    version: str
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    binary: tuple[str, ...] = ()
    whole_world: bool = False  # reinit_process_group makes the default group anew, whatever it is asked for


class Sources:
    """The Python files of torch_npu, from a wheel or from a folder that holds the folder torch_npu."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files
        self._trees: dict[str, ast.Module] = {}

    @classmethod
    def of_wheel(cls, wheel: zipfile.ZipFile) -> Sources:
        names = [name for name in wheel.namelist() if name.startswith("torch_npu/") and name.endswith(".py")]
        return cls({name: wheel.read(name).decode("utf-8", "replace") for name in names})

    @classmethod
    def of_folder(cls, root: Path) -> Sources:
        return cls({str(path.relative_to(root)): path.read_text("utf-8") for path in root.glob("torch_npu/**/*.py")})

    def __bool__(self) -> bool:
        return bool(self._files)

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((name for name in (f"{path}/__init__.py", f"{path}.py") if name in self._files), None)

    def _tree(self, name: str) -> ast.Module:
        if name not in self._trees:
            self._trees[name] = ast.parse(self._files[name])
        return self._trees[name]

    def find(self, dotted: str, asked: frozenset[str] = frozenset()) -> ast.FunctionDef | ast.ClassDef | None:
        """The function or class of that name, or the method of a class; None when there is none.

        `asked`: names that led here. Modules that import each other would lead in a circle.
        """
        module, _, name = dotted.rpartition(".")
        file = self._file(module)
        if dotted in asked or not module:
            return None
        if file is None:
            owner = self.find(module, asked | {dotted})
            return _member(owner, name) if isinstance(owner, ast.ClassDef) else None
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        for node in reversed(self._tree(file).body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom) and (origin := imported(node, name, package)):
                found = self.find(origin, asked | {dotted})
                if found:
                    return found
        return None

    def parameters(self, dotted: str) -> tuple[str, ...] | None:
        """Names of the parameters of a function, of a method, or of the constructor of a class; None: not there."""
        found = self.find(dotted)
        if isinstance(found, ast.ClassDef):
            found = _member(found, "__new__") or _member(found, "__init__")
            if found is None:
                return ()
        if found is None:
            return None
        names = [each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
        return tuple(name for name in names if name not in ("self", "cls"))


def _member(owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def imported(node: ast.ImportFrom, name: str, package: str) -> str:
    """Where an import statement of `package` takes `name` from, or may take it from ("*"); "" where it does not."""
    parents = package.split(".")
    above = parents[: len(parents) - node.level + 1] if node.level else []
    for alias in node.names:
        if alias.name == "*" or (alias.asname or alias.name) == name:
            return ".".join([*above, *filter(None, [node.module]), name if alias.name == "*" else alias.name])
    return ""


def wanted() -> list[str]:
    """All names of Python that the platform uses, methods too."""
    return [*npu.NAMES, *(f"{owner}.{method}" for owner, methods in npu.METHODS.items() for method in methods)]


def read_wheel(path: Path) -> Release:
    with zipfile.ZipFile(path) as wheel:
        version = path.name.split("-")[1]
        sources = Sources.of_wheel(wheel)
        found = {name: sources.parameters(name) for name in wanted()}
        words = [*IN_BINARY, *(name for names in npu.CANN.values() for name in names)]
        seen: set[str] = set()
        for name in wheel.namelist():
            if LIBRARY.search(name):
                content = wheel.read(name)
                seen.update(word for word in words if _has_word(content, word))
        return Release(
            version,
            {name: parameters for name, parameters in found.items() if parameters is not None},
            tuple(word for word in words if word in seen),
            sources.find(npu._REINIT_ALL) is not None,
        )


def _has_word(content: bytes, word: str) -> bool:
    """As a string of its own, or at the begin of a text: functions of CANN are named in messages as well."""
    place = content.find(word.encode())
    while place >= 0:
        before, after = content[place - 1 : place], content[place + len(word) : place + len(word) + 1]
        if not (before.isalnum() or before == b"_" or after.isalnum() or after == b"_"):
            return True
        place = content.find(word.encode(), place + 1)
    return False


def release_key(version: str) -> tuple[int, ...]:
    """Order of releases: 2.1.0 < 2.1.0.post8 < 2.1.0.post17 < 2.6.0."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def text_of(releases: list[Release]) -> str:
    """The module that is written."""
    lines = [
        '"""What releases of torch_npu have of what the NPU platform calls: written by scripts/torch_npu_names.py from',
        'their wheels. Names that C++ registers, and functions of CANN, are those that the binaries name."""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Mapping",
        "",
        "# fmt: off",
        "# Names of Python by release, with all their parameters.",
        "PYTHON: dict[str, dict[str, tuple[str, ...]]] = {",
    ]
    for release in releases:
        lines.append(f'    "{release.version}": {{')
        lines += [f'        "{name}": {_tuple(parameters)},' for name, parameters in release.parameters.items()]
        lines.append("    },")
    lines += ["}", "", "BINARY: dict[str, tuple[str, ...]] = {"]
    for release in releases:
        lines.append(f'    "{release.version}": (')
        lines += [f'        "{name}",' for name in release.binary]
        lines.append("    ),")
    lines += ["}", "", "# In these, reinit_process_group makes the default group anew, whichever it is asked for."]
    lines.append(f"WHOLE_WORLD: tuple[str, ...] = {_tuple(tuple(r.version for r in releases if r.whole_world))}")
    lines += [
        "# fmt: on",
        "",
        "",
        "def having(names: Mapping[str, tuple[str, ...]]) -> list[str]:",
        '    """The releases that have all these names with these parameters."""',
        "    return [",
        "        release",
        "        for release, known in PYTHON.items()",
        "        if all(name in known and set(parameters) <= set(known[name]) for name, parameters in names.items())",
        "    ]",
    ]
    return "\n".join(lines) + "\n"


def _tuple(words: tuple[str, ...]) -> str:
    inside = ", ".join(f'"{word}"' for word in words)
    return f"({inside},)" if len(words) == 1 else f"({inside})"


# What a user may want, with the names that it needs.
ABILITIES: dict[str, tuple[str, ...]] = {
    "out of collectives": ("torch_npu.npu.stop_device", "torch_npu.npu.restart_device"),
    "memory repair": ("torch_npu.npu.check_uce_in_memory", "torch_npu.npu._recovery.update_npu_tensor_to_safe"),
    "groups mended in place": ("torch_npu.distributed.reinit_process_group",),
    "time of an update": ("torch_npu.npu.Event.recorded_time",),
    "main and backup link": ("torch_npu.npu._comm_switch_nic",),
    "stress of cores, links": ("torch_npu.npu.stress_detect",),
}


def page_table(releases: list[Release]) -> str:
    """The rows of docs/npu.md."""
    lines = ["| torch_npu | " + " | ".join(ABILITIES) + " |", "|---|" + "---|" * len(ABILITIES)]
    for release in releases:
        cells = [_ability(release, what) for what in ABILITIES]
        lines.append(f"| {release.version} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ability(release: Release, what: str) -> str:
    known = release.parameters
    missing = [name for name in ABILITIES[what] if not set(npu.NAMES.get(name, ())) <= set(known.get(name, ()))]
    missing += [name for name in ABILITIES[what] if name not in known and name not in missing]
    if "torch_npu.npu.stress_detect" in missing and "torch_npu.npu.stress_detect" in known:
        return "cores"
    if missing:
        return "no"
    return "built anew" if what == "groups mended in place" and release.whole_world else "yes"


def with_table(page: str, table: str) -> str:
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="folder with wheels of torch_npu")
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_args()
    wheels = sorted(options.wheels.glob("torch_npu-*.whl"), key=lambda path: release_key(path.name.split("-")[1]))
    if not wheels:
        parser.error(f"{options.wheels} holds no wheel of torch_npu")
    releases = [read_wheel(wheel) for wheel in wheels]
    text, page = text_of(releases), with_table(PAGE.read_text(encoding="utf-8"), page_table(releases))
    if options.check:
        return int(text != TARGET.read_text(encoding="utf-8") or page != PAGE.read_text(encoding="utf-8"))
    TARGET.write_text(text, encoding="utf-8")
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
