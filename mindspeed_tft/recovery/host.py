"""What a recovery asks of the training framework. `patches` implements it for Megatron; tests for toys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mindspeed_tft.engine.types import RankInfo
from mindspeed_tft.platforms import Damage
from mindspeed_tft.recovery.notices import Notice
from mindspeed_tft.recovery.record import SmallState, StepRecord
from mindspeed_tft.replica.digest import Shard


class Host(Protocol):
    """The framework as one rank sees it. Only `commit` and what a repair uses after `regroup` may communicate: during a
    dump there is nobody to talk to."""

    def info(self) -> RankInfo:
        """Who this rank is and which optimizer shards it holds."""

    def shards(self) -> dict[str, Shard]:
        """The optimizer shards in this rank's memory by their ids, as they lie now: to be read, for their hashes."""

    def save_directory(self) -> Path:
        """Where the framework keeps its checkpoints (`--save`)."""

    def saved_step(self) -> int:
        """The step of the last checkpoint in `--save` that this run itself has completed or loaded; -1 if none."""

    def checkpoints(self) -> tuple[int, ...]:
        """Steps whose checkpoint `load` could load, ascending: saved to the end, or loaded, by this very run."""

    def stopped(self) -> None:
        """Training stopped. Give up what this rank does in the background: from here on nobody but orders writes."""

    @property
    def notices(self) -> Callable[[int], Notice]:
        """What ranks that are held tell each other of a hold, by its id."""

    def commit(self, step: int, hold: int = 0, save: int = 0, limit: int = 0) -> tuple[int, int, int]:
        """The commit collective over all ranks. Returns only if every rank entered it for the same step: the highest
        `hold`, `save` and `limit` that any of them brought."""

    def all_agree(self, mine: bool) -> bool:
        """Whether all ranks say yes: a collective, between two steps."""

    def small_state(self, step: int) -> SmallState:
        """The small state as it is now, taken for the end of `step`."""

    def small_state_after(self, record: StepRecord) -> SmallState:
        """The small state of the end of `record.step`, set absolutely from the state at its start."""

    def rng_digest(self, state: SmallState) -> str:
        """sha256 of a snapshot's RNG states; "" where each rank of a part has random states of its own."""

    def finish_update(self, record: StepRecord) -> None:
        """Complete the local update of `record.step` in every optimizer of the chain that is still untouched."""

    def stage_shards(self, shards: list[str], directory: Path) -> dict[str, str]:
        """Write own shards as files for a writer to read; returns sha256 by file name."""

    def write_part(self, state: SmallState, part: str, sources: dict[str, str], directory: Path) -> dict[Path, str]:
        """Write this part's checkpoint files of `state.step` below `directory`, from own and staged shards;
        returns their sha256."""

    def complete(self, step: int, parts: list[str], directory: Path) -> dict[Path, str]:
        """Write the files of the checkpoint of `step` below `directory` that belong to no part, once all `parts` are
        written; returns their sha256."""

    def damage(self) -> Damage:
        """What a memory error of this rank's device has hit, once everything that the broken step held is released."""

    def regroup(self, epoch: int, link: str) -> None:
        """Build every process group anew under `epoch`, together with all ranks, on `link` ("": the default one)."""

    def check_link(self, link: str) -> list[str]:
        """Addresses of this rank on a link that groups may be moved to. RuntimeError: it cannot use it, and why."""

    def move_groups(self, link: str, epoch: int, seconds: float) -> None:
        """Between two steps: build every process group anew on `link` under `epoch`, together with all ranks, of which
        none communicates. `seconds`: for one group. RuntimeError: it cannot be done; then no group works any more."""

    def test_groups(self, seconds: float) -> dict[str, str]:
        """All-reduce on every group, together with all ranks, in so many seconds. Result: groups, bytes, seconds.
        RuntimeError: a group does not work, or does not use its link."""

    def send_shard(self, shard: str, target: int) -> int:
        """Send own shard to a rank over the new groups, with its hash; returns the bytes. "<part>/unowned" names the
        tensors of the part that no optimizer owns."""

    def receive_shard(self, shard: str, source: int) -> int:
        """Take a shard from a rank, check its hash, and put it in the place of the own one; returns the bytes."""

    def load(self, step: int) -> None:
        """Load the checkpoint of `step` on all ranks together, and put everything that training touched since back to
        its end. Later checkpoints are not used any more, by this job or by one that goes on after it."""

    def roll_back(self, state: SmallState, again: bool) -> None:
        """Put everything that a broken step touched to the end of `state.step`; ends with a gather of all ranks.
        `again`: the batches of the broken step have to come once more."""

    def send_state(self, state: SmallState, target: int) -> int:
        """Send a small state to a newcomer of the same part over the new groups; returns the bytes."""

    def receive_state(self, source: int) -> SmallState:
        """Take the small state of a rank of the same part."""

    def take_place(self, state: SmallState) -> None:
        """As `roll_back`, for a process that has trained no step: its data begins at what `state` has consumed."""

    def forget_first_times(self) -> None:
        """What ranks find out in their first step and keep, by communication or about its order, is found out anew:
        a newcomer has to."""

    def checkpoint_directory(self, base: Path, step: int) -> Path:
        """Where the checkpoint of `step` lies below `base`."""

    def tracker(self, base: Path) -> Path:
        """The file that names the latest checkpoint below `base`."""
