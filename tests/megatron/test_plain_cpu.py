"""Stock Megatron on CPU and gloo, without the plugin: the ground that every comparison stands on.

If two of these runs differ, no test of a recovery proves anything.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Processes

pytestmark = pytest.mark.megatron

# Small on purpose: a run costs its start-up.
SMALL = "--hidden-size 64 --ffn-hidden-size 128 --ckpt-format torch".split()
LAYOUTS = {
    "dp4": "--num-distributed-optimizer-instances 2",
    "tp2dp2": "--tensor-model-parallel-size 2 --num-distributed-optimizer-instances 2",
    "pp2dp2": "--pipeline-model-parallel-size 2 --num-distributed-optimizer-instances 2",
}


def train(processes: Processes, root: Path, ranks: int, *arguments: str | Path) -> list[str]:
    """Run the plain example and return what every step printed, less its time."""
    script = root / "examples" / "pretrain_gpt_cpu.sh"
    output = processes.run([script, *SMALL, *arguments], timeout=150, env={"RANKS": str(ranks)})
    steps = re.findall(r"iteration +(\d+)/.*(lm loss: \S+).*(grad norm: \S+)", output)
    return [" ".join(step) for step in steps]


def digests(processes: Processes, checkpoint: Path) -> dict[str, str]:
    program = Path(__file__).with_name("digest_checkpoint.py")
    output = processes.run([sys.executable, "-W", "ignore", program, checkpoint])
    found: dict[str, str] = json.loads(output.splitlines()[-1])
    # An oracle must first prove that it compares something: weights, both moments, and the random state.
    for part in ("word_embeddings.weight", "/exp_avg/", "/exp_avg_sq/", "torch_rng_state"):
        assert any(part in f"{name}/" for name in found), f"no {part} in {sorted(found)}"
    return found


@pytest.mark.full
def test_two_runs_are_identical(root: Path, processes: Processes, tmp_path: Path) -> None:
    seen = []
    for name in ("first", "second"):
        steps = train(processes, root, 2, "--train-iters", "3", "--save", tmp_path / name, "--save-interval", "3")
        seen.append((steps, digests(processes, tmp_path / name / "iter_0000003")))
    assert len(seen[0][0]) == 3
    assert seen[0] == seen[1]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stop_and_resume_equals_straight_through(
    layout: str, dtype: str, root: Path, processes: Processes, tmp_path: Path
) -> None:
    arguments = [*LAYOUTS[layout].split(), *(["--bf16"] if dtype == "bf16" else []), "--save-interval", "3"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(processes, root, 4, *arguments, "--train-iters", "6", "--save", straight)
    train(processes, root, 4, *arguments, "--train-iters", "6", "--exit-interval", "3", "--save", resumed)
    assert (resumed / "latest_checkpointed_iteration.txt").read_text() == "3"
    train(processes, root, 4, *arguments, "--train-iters", "6", "--save", resumed, "--load", resumed)
    assert digests(processes, straight / "iter_0000006") == digests(processes, resumed / "iter_0000006")
