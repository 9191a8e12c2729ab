"""Write `docs/compatibility.md` from the tests that prove it.

python scripts/compatibility.py            write the page
python scripts/compatibility.py --print    print it
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed_tft.facade.words import NOT_SERVED
from mindspeed_tft.patches.groups import RELEASES
from mindspeed_tft.patches.megatron_unproved import UNPROVED
from mindspeed_tft.patches.megatron_unproved_releases import IN_RELEASES
from mindspeed_tft.platforms import npu, torch_npu_names

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"


def data(name: str) -> ModuleType:
    """A module with rows; the tests are no package that could be imported."""
    spec = importlib.util.spec_from_file_location(f"rows_{name}", ROOT / "tests" / "megatron" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def page() -> str:
    rows = data("compatibility")
    lines = [
        *_head(rows.MEGATRON),
        *_proved(rows),
        *_refused(data("refused").REFUSED),
        *_releases(rows),
        *_states(rows),
        *_torch_npu(),
        *_mindio(),
    ]
    return "\n".join(lines) + "\n"


def _head(release: str) -> Iterator[str]:
    yield "# Compatibility with Megatron"
    yield ""
    yield "<!-- written by scripts/compatibility.py from tests/megatron/compatibility.py; a test compares the two -->"
    yield ""
    yield f"Each feature of Megatron (here megatron-core {release}, on CPU with gloo) is proved exact by a test, or"
    yield "refused at start-up. What has no state that outlives a micro-batch (activation functions, kinds of layers,"
    yield "tokenizers, forms of logs) has nothing to put back and is not listed."
    yield ""


def _proved(rows: ModuleType) -> Iterator[str]:
    yield "## Proved exact"
    yield ""
    yield "A drill trains a real Megatron job with the flags, breaks it at the given place, and compares every byte at"
    yield "the end (with preset `dump` the dump as well) with the unbroken run of stock Megatron. To repeat one:"
    yield "`tftctl drill ARGUMENTS -- FLAGS`, or `pytest -m full tests/megatron/test_compatibility.py`."
    yield ""
    drills = ((row.features, code(row.flags), code(shlex.join(_before_flags(row.arguments())))) for row in rows.PROVED)
    yield from table(("feature", "flags", "drill"), drills)
    yield ""
    yield "Proved by other tests:"
    yield ""
    tests = ((row.features, code(row.flags), _names(row.tests)) for row in rows.ELSEWHERE)
    yield from table(("feature", "flags", "tests"), tests)
    yield ""


def _before_flags(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _refused(rows: Iterable[Any]) -> Iterator[str]:
    options = {option.attribute: option for option in UNPROVED}
    yield "## Refused at start-up"
    yield ""
    yield "With `--enable-high-availability`, before any process group exists, with exit status 2"
    yield "(`tests/megatron/test_refusals.py` starts each of them). Those marked *online* hinder a repair or a newcomer"
    yield "only: a job that just dumps may have them."
    yield ""
    lines = [(row.features, options[attribute]) for row in rows for attribute in row.flags]
    yield from table(
        ("feature", "flag", "reason", "remedy"),
        (
            (features, code(option.flag) + " *online*" * option.online, option.reason, option.remedy)
            for features, option in lines
        ),
    )
    yield ""


def _releases(rows: ModuleType) -> Iterator[str]:
    yield "## Releases"
    yield ""
    yield f"All of the above was run with megatron-core {rows.MEGATRON}. Other releases were drilled with"
    yield "`tftctl drill --megatron CHECKOUT`; to do it again:"
    yield "`TFT_MEGATRON_PATH=CHECKOUT pytest -m full tests/megatron/test_checkouts.py tests/megatron/test_core_06.py`."
    yield ""
    proved = ((row.release, row.source, row.proved, _names(row.tests)) for row in rows.RELEASES)
    yield from table(("release", "from", "proved exact", "tests"), proved)
    yield ""
    if rows.NOT_RUN:
        yield "What the first section lists beyond that is accepted here, and not proved. Tests"
        yield f"of some of it are written and were not run yet: {_names(rows.NOT_RUN)}."
        yield ""
    yield f"Accepted is Megatron {RELEASES}; every other release is refused at start-up."
    yield "Options that are proved with 0.19 and not with older releases are refused there:"
    yield ""
    lines = [(older.versions, option) for older in IN_RELEASES for option in older.options]
    yield from table(
        ("releases", "flag", "reason", "remedy"),
        ((code(versions), code(option.flag), option.reason, option.remedy) for versions, option in lines),
    )
    yield ""
    yield "Before 0.13 Megatron adds the gradients of all optimizer instances up in one norm, so with N replicas it"
    yield "clips at 1/sqrt(N) of `--clip-grad`. The plugin mends that (`patches/megatron_grad_norm.py`): a job with"
    yield "replicas has the norm of a job without, and so has the unbroken run of a drill. Megatron alone with"
    yield "`--num-distributed-optimizer-instances` has the old norm: on these releases a job that goes on without the"
    yield "plugin goes on exactly where nothing is clipped, and otherwise with that norm."
    yield ""
    yield "From 0.17 on Megatron's own checkpoints with `--dist-ckpt-optim-fully-reshardable` hold wrong optimizer"
    yield "states where a gap lies behind a bucket of the gradient buffer: parameters of later buckets get those of"
    yield "their neighbours, and nothing fails. (Seen with tied embeddings and a pipeline, which have a bucket of"
    yield "their own.) The plugin mends that, too (`patches/megatron_reshardable.py`): checkpoints of a job with the"
    yield "plugin are right, and so are those of a drill's unbroken run. Without the plugin leave that flag away."
    yield ""


def _states(rows: ModuleType) -> Iterator[str]:
    refused = {option.attribute: option.flag for option in UNPROVED}
    yield "## States that a fault leaves behind"
    yield ""
    yield "What a step that is broken off leaves in a process, what puts it back, and the tests that would see it if"
    yield "nothing did."
    yield ""
    lines = (
        (
            state.what,
            ", ".join(f"refused: {code(refused[name])}" if name in refused else code(name) for name in state.by),
            _names(state.tests),
        )
        for state in rows.STATES
    )
    yield from table(("state", "put back by", "tests"), lines)


def _torch_npu() -> Iterator[str]:
    """The contract with torch_npu, from the facts that `scripts/torch_npu_names.py` has read from its wheels."""
    yield ""
    yield "## Names of torch_npu"
    yield ""
    yield "What the [NPU platform](npu.md) calls, with the parameters that it passes, and the releases whose sources"
    yield "have it so (`tests/unit/test_torch_npu_names.py`)."
    yield ""
    names = {**npu.NAMES, **{f"{owner}.{each}": () for owner, methods in npu.METHODS.items() for each in methods}}
    every = list(torch_npu_names.PYTHON)
    lines = []
    for name, parameters in names.items():
        having = torch_npu_names.having({name: parameters})
        call = code(f"{name}({', '.join(parameters)})")
        lines.append((call, "all of them" if having == every else ", ".join(having)))
    yield from table(("name", f"releases, of {', '.join(every)}"), lines)


def _mindio() -> Iterator[str]:
    """The contract with adaptors of MindIO TFT, from the modules that serve its names."""
    yield ""
    yield "## Names of mindio_ttp"
    yield ""
    yield "What the [facade](mindio-facade.md) serves of them, by module, and what it refuses with the reason"
    yield "(`tests/unit/test_mindio_names.py`, which compares with MindSpeed-LLM's sources where they are given)."
    yield ""
    modules = ("framework_ttp", "framework_ttp.ttp_decorator", "utils", "controller_ttp")
    lines = []
    for name in modules:
        names = importlib.import_module(f"mindspeed_tft.facade.mindio_ttp.{name}").__all__
        served, refused = ([code(one) for one in names if (one in NOT_SERVED) is wanted] for wanted in (False, True))
        lines.append((code(f"mindio_ttp.{name}"), ", ".join(served), ", ".join(refused)))
    yield from table(("module", "served", "refused"), lines)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' for _ in head)}|"
    for line in lines:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"


def code(text: str) -> str:
    return f"`{text}`" if text and not text.startswith("(") else text


def _names(tests: Sequence[str]) -> str:
    return ", ".join(code(test.removeprefix("tests/")) for test in tests)


def main() -> None:
    text = page()
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
