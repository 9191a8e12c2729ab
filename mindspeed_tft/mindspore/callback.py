"""`FaultTolerance`, the callback of MindSpore's `Model.train`. Importing this imports MindSpore."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from mindspore.train import Callback

from mindspeed_tft.mindspore.framework import Handler
from mindspeed_tft.mindspore.training import Training


class FaultTolerance(Callback):  # type: ignore[misc]  # MindSpore is untyped
    """Protects this rank while `Model.train` runs.

    Args:
        save: directory of the checkpoints, the same for all ranks.
        part: a name for the ranks that hold the same parameters as this one. "": all ranks of the job do, as in plain
            data parallelism; needed with anything else.
        link_handler: switches the links of all ranks: `handler(ranks, use_backup) -> worked`. None: MindSpore's own.
        settings: what `docs/flags.md` names, in lower case: `tft_deadline=60`, `tft_tls_dir=...`.

    Raises:
        Refused: a setting, or a switch of MS_ENABLE_TFT, that cannot work; it names the flag, the reason, the remedy.
    """

    def __init__(
        self, save: str | Path, *, part: str = "", link_handler: Handler | None = None, **settings: Any
    ) -> None:
        super().__init__()
        self._training = Training(Path(save), part, link_handler, settings)

    def resume(self, network: Any) -> int:
        """Load the newest checkpoint of this rank's part into the cell that trains (`model.train_network`).

        Returns:
            The step that it is of, 0 where there is none: training is to go on with the data after that step.

        Raises:
            DumpError: there is a checkpoint, and it does not fit or does not verify.
        """
        return self._training.resume(network)

    def on_train_begin(self, run_context: Any) -> None:
        self._training.begin(run_context.original_args())

    def on_train_step_begin(self, run_context: Any) -> None:
        self._training.step_begin(run_context.original_args())

    def on_train_step_end(self, run_context: Any) -> None:
        self._training.step_end(run_context.original_args(), bool(run_context.get_stop_requested()))

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, Exception):
            self._training.failed(exc)
