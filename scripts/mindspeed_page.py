"""Write `docs/mindspeed.md` from the tables behind its refusals and its tests.

python scripts/mindspeed_page.py            write the page
python scripts/mindspeed_page.py --print    print it
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from compatibility import ROOT, code, data, table

from mindspeed_tft.patches import megatron_unproved, mindspeed_unproved

PAGE = ROOT / "docs" / "mindspeed.md"

_HEAD = """\
# Beside MindSpeed

<!-- written by scripts/mindspeed_page.py from tests/megatron/mindspeed_features.py; a test compares the two -->

MindSpeed patches Megatron for Ascend NPUs; so does this plugin for recoveries. The two know of each other:

```python
import torch
import mindspeed.megatron_adaptor
import mindspeed_tft.adaptor  # in this order, or the other way round
```

- MindSpeed finds Megatron as if the plugin were not there, also when it takes its patches back and applies them anew
  (`repatch`); afterwards the plugin is the outermost layer again.
- The flags of both stand on one command line; `--optimization-level` may be 0, 1 or 2.
- `tftctl patches` shows which targets both have patched.
- A step that is broken off while MindSpeed's optimizer updates leaves `start_param_sync` bound to one kind of buckets;
  that is put back before the step is computed again.

What follows is checked with Megatron {megatron} and MindSpeed {releases},
on CPU with gloo and a stand-in for `torch_npu` (`tests/support/npu`): no NPU has run it.

## Run the tests

With checkouts that fit each other:

```
export TFT_MEGATRON_PATH=/path/to/Megatron-LM TFT_MINDSPEED_PATH=/path/to/MindSpeed
pytest -m "" tests/megatron/test_mindspeed.py
```

One drill by hand:

```
PYTHONPATH=tests/support/npu:$TFT_MINDSPEED_PATH tftctl drill --megatron $TFT_MEGATRON_PATH \\
  --import mindspeed.megatron_adaptor --preset recover
```
"""
_LLM = """\
## MindSpeed-LLM

MindSpeed-LLM has an adaptor for MindIO with flags of the same names (`--enable-high-availability` and the others). Its
own `pretrain` and `train`, which it runs instead of Megatron's, act on them. Two systems that answer one fault would
undo each other's work, so one is in force:

| what is loaded | with `--enable-high-availability` |
|---|---|
| MindSpeed alone | this plugin |
| MindSpeed-LLM (its loop or its HighAvailabilityFeature) and `mindio_ttp` | MindSpeed-LLM's; the plugin stays off |
| MindSpeed-LLM without `mindio_ttp` | refused at start-up |
| MindSpeed for core_r0.6.0, which has such an adaptor itself | as MindSpeed-LLM |

Rank 0 says at start-up that the plugin stays off; its `--tft-` flags have no effect then. Two ways to be protected by
this project all the same:

- MindSpeed-LLM's adaptor on this project's engine: import `mindspeed_tft.facade.mindio` first, instead of
  `mindspeed_tft.adaptor`. It serves `mindio_ttp` ([facade](mindio-facade.md)).
- The plugin itself: train with Megatron's own `pretrain_gpt.py` and `mindspeed.megatron_adaptor`.
"""


_DEFAULT = """\
## On without a flag

| level | what MindSpeed changes by itself |
|---|---|
| 0, optimizer | AdamW in the place of apex's; steps of chained optimizers; gathers of dense parameters and experts |
| 0, checkpoints | how optimizer states are loaded; copies for saves in the background |
| 0, layers | norms, SwiGLU, softmax; `torch.compile` off |
| 1 | a part of the cross entropy |
| 2 | attention masks, embeddings; between pipeline stages sends and receives one by one |

The drills below have them, each its level and what is below it.
"""


def page() -> str:
    rows = data("mindspeed_features")
    releases = " and ".join(rows.RELEASES)
    head = _HEAD.format(megatron=rows.MEGATRON, releases=releases)
    parts = [head.splitlines(), [""], _DEFAULT.splitlines(), [""], _drills(rows), _refused(rows)]
    parts += [_apart(rows), _LLM.splitlines()]
    return "\n".join(line for part in parts for line in part) + "\n"


def _drills(rows: ModuleType) -> Iterator[str]:
    yield "## Drills"
    yield ""
    yield "A drill trains with MindSpeed and these flags, breaks the job, and compares every byte with the unbroken run"
    yield "of Megatron and MindSpeed without the plugin. Where the last column is empty, it has not been run yet."
    yield ""
    lines = (
        (row.features, code(row.flags), code(_drill(row)), row.order, ", ".join(row.passed)) for row in rows.DRILLS
    )
    yield from table(("what", "flags", "drill", "imports", "exact with MindSpeed"), lines)
    yield ""


def _drill(row: Any) -> str:
    return shlex.join(["--preset", row.preset, "--layout", row.layout, "--dtype", row.dtype, "--fault", row.fault])


def _refused(rows: ModuleType) -> Iterator[str]:
    yield "## Refused at start-up"
    yield ""
    yield "With `--enable-high-availability`, with exit status 2. So is what `repatch` turns on before Megatron has"
    yield "read its arguments. What is read only beside such an option is refused with it. Of Megatron's own options"
    yield "[compatibility](compatibility.md) has the list: context parallelism (ulysses, ring attention), FSDP, other"
    yield "optimizers than Adam, and more."
    yield ""
    lines = ((code(o.flag), o.reason, o.remedy, _with(rows, o.flag)) for o in mindspeed_unproved.UNPROVED)
    yield from table(("flag", "reason", "remedy", "with it"), lines)
    yield ""
    of_megatron = {option.flag for option in megatron_unproved.UNPROVED}
    yield "MindSpeed's options that are read only beside one of Megatron's which is refused:"
    yield ""
    yield from table(
        ("flag of Megatron", "options"),
        ((code(flag), _with(rows, flag)) for flag in rows.COMPANIONS if flag in of_megatron),
    )
    yield ""


def _with(rows: ModuleType, flag: str) -> str:
    return _codes(rows.COMPANIONS.get(flag, "").split())


def _codes(words: Iterable[str]) -> str:
    return ", ".join(code(word) for word in words)


def _apart(rows: ModuleType) -> Iterator[str]:
    yield "## Apart from recoveries"
    yield ""
    yield "Nothing that a recovery puts back depends on these."
    yield ""
    lines = ((_codes([*row.flags.split(), *_companions(rows, row)]), row.why) for row in rows.APART)
    yield from table(("options", "why"), lines)
    yield ""


def _companions(rows: ModuleType, row: Any) -> Iterator[str]:
    for flag in row.flags.split():
        yield from rows.COMPANIONS.get(flag, "").split()


def main() -> None:
    text = page()
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
