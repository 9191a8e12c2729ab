"""Megatron's own `pretrain_gpt.py`, as it stands in the checkout that is on the path, started like `gpt_job`.

    python -m stock_gpt --with-plugin    MEGATRON FLAGS     with the one line that the plugin asks for
    python -m stock_gpt --without-plugin MEGATRON FLAGS     unchanged

In both, ranks write the log of their steps that a drill reads.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import wrapt

from mindspeed_tft.faults import gpt_job

FIRST = "import torch\n"
LINE = "import mindspeed_tft.adaptor\n"


def program() -> Path:
    """Found without an import of Megatron: the plugin has to come first."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations, "there is no Megatron on the path"
    return Path(next(iter(spec.submodule_search_locations))).parent / "pretrain_gpt.py"


def main() -> None:
    with_plugin = sys.argv.pop(1) == gpt_job.WITH_PLUGIN
    path = program()
    source = path.read_text()
    assert source.count(FIRST) == 1, f"{path} imports torch in another way"
    if with_plugin:
        source = source.replace(FIRST, FIRST + LINE)
    else:
        gpt_job.prepare(with_plugin=False)
    if steps := os.environ.get(gpt_job.ENV_STEPS):
        wrapt.register_post_import_hook(lambda _: gpt_job._log_steps(Path(steps)), "megatron.training.training")
    sys.argv[0] = str(path)
    exec(compile(source, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
    gpt_job.leave()


if __name__ == "__main__":
    main()
