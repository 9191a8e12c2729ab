"""Puts the protection of one rank together: settings -> place -> control plane -> member. The callback calls it."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_tft import arguments
from mindspeed_tft.engine.types import RankInfo
from mindspeed_tft.mindspore import layout, places, protection, switches
from mindspeed_tft.mindspore.framework import STEP, Handler, Link, MindSpore, why_no_dump_of, world_size
from mindspeed_tft.mindspore.member import Member
from mindspeed_tft.observe import logs
from mindspeed_tft.recovery import files
from mindspeed_tft.settings import Refused, Settings, build, from_environment, from_platform

WHOLE = "whole"  # name of the part where all ranks hold everything
_ELSEWHERE = {
    "enable_hbmfault_repair": switches.REFUSED["UCE"],
    "enable_worker_reboot": switches.REFUSED["ARF"],
    "tft_fault_rules": ("texts of errors decide nothing here: each fault is answered by a dump", "leave it out"),
    "enable_elastic_training": ("the groups of MindSpore cannot be built anew with fewer ranks", "leave it out"),
}
_SAME = ("stand_alone", "data_parallel")  # parallel modes in which all ranks hold the same


def settle(environ: Mapping[str, str], given: Mapping[str, Any], switched: switches.Switches) -> Settings:
    """The settings of a job: the environment first, as for Megatron.

    Raises:
        Refused: one that is unknown, malformed, or not served for MindSpore.
    """
    layers = [(f"environment {name}", {key: value}) for name, key, value in (
        (switches.IP, "tft_controller_address", switched.address), (switches.PORT, "tft_controller_port", switched.port)
    ) if value is not None]  # fmt: skip
    for key in given:
        if key not in Settings.model_fields:
            raise Refused(f"FaultTolerance({key}=...)", "there is no such setting", "see docs/mindspore.md")
    found, origin = build([*layers, *from_environment(environ), ("FaultTolerance(...)", given), from_platform(environ)])
    for key, (reason, remedy) in _ELSEWHERE.items():
        if getattr(found, key):
            raise Refused(key, f"{reason} (MindSpore)", remedy)
    for refusal in arguments.steered(found, origin):
        raise refusal
    return found


class Training:
    """The protection of this process, over all calls of `Model.train` in it."""

    def __init__(self, save: Path, part: str, link_handler: Handler | None, given: Mapping[str, Any]) -> None:
        self._switches = switches.read(os.environ)
        self._settings = settle(os.environ, given, self._switches)
        if part and not layout.valid_part(part):
            raise Refused(
                "FaultTolerance(part=...)", f"{part!r} cannot be the name of a file", "use letters and digits"
            )
        self._save, self._part, self._handler = save.absolute(), part, link_handler
        self._member: Member | None = None
        self._base = 0  # the step before the first one of this process
        self._offset = 0  # from MindSpore's count of steps to ours
        self._last = 0
        self._parameters: dict[str, Any] = {}  # of the network that is protected

    # ------------------------------------------------------------------------------------------------ resuming

    def resume(self, network: Any) -> int:
        """See `FaultTolerance.resume`."""
        import mindspore as ms

        step = layout.latest(self._save)
        if step is None:
            return 0
        directory = layout.checkpoint(self._save, step)
        files.verify_checkpoint(directory)
        path = layout.part_file(directory, self._part or WHOLE)
        found = ms.load_checkpoint(str(path))
        stated = int(found.pop(STEP).asnumpy()) if STEP in found else step
        wanted = set(network.parameters_dict())
        if stated != step or not wanted <= set(found):
            lacks = f"lacks {sorted(wanted - set(found))[:3]}" if stated == step else f"is of step {stated}"
            raise files.DumpError(f"{path} does not fit this job: it {lacks}")
        missing, _ = ms.load_param_into_net(network, found, strict_load=True)
        if missing:
            raise files.DumpError(f"{path} was not loaded completely: {missing[:3]} are not in it")
        self._base = step
        return step

    # ------------------------------------------------------------------------------------------------ the step path

    def begin(self, args: Any) -> None:
        """`Model.train` begins. The first call of a process starts its protection."""
        if not self._switches.any:
            return
        count = int(args.get("cur_step_num") or 0)
        if self._member is None:
            self._base = self._base or count  # a trainer that has loaded a state itself counts on from there
            self._last = self._base
            self._start(args)
        elif any(self._parameters.get(name) is not one for name, one in args.train_network.parameters_dict().items()):
            raise Refused(
                "FaultTolerance",
                "Model.train is called with another network than before, and one process protects one state",
                "train the other network in a job of its own, or without FaultTolerance",
            )
        self._offset = self._last - count

    def step_begin(self, args: Any) -> None:
        if self._member is not None:
            self._member.step_begin(self._last + 1)

    def step_end(self, args: Any, leaves: bool) -> None:
        if self._member is None:
            return
        step = int(args.cur_step_num) + self._offset
        if step != self._last + 1:
            raise Refused(
                "sink_size",
                f"a callback sees step {step} after step {self._last}: several steps pass as one",
                "train with dataset_sink_mode=False, or sink_size=1",
            )
        self._last = step
        total = int(args.get("epoch_num") or 0) * int(args.get("batch_num") or 0)
        self._member.step_end(step, leaves or (total > 0 and int(args.cur_step_num) >= total))

    def failed(self, exc: Exception) -> None:
        """`Model.train` ends with an exception. Does not return where a controller protects this job."""
        if self._member is not None:
            atexit.unregister(protection.goodbye)  # the others must not wait for this rank
            self._member.failed(exc)

    # ------------------------------------------------------------------------------------------------ starting

    def _start(self, args: Any) -> None:
        place = places.find(os.environ)
        mode, ranks = str(args.get("parallel_mode", "stand_alone")), world_size()
        if ranks != place.world_size:
            raise Refused(
                "MS_WORKER_NUM",
                f"MindSpore trains with {ranks} ranks, and the launcher's environment tells of {place.world_size}",
                "start the job with msrun, and call mindspore.communication.init() before Model.train",
            )
        if not self._part and mode not in _SAME and place.world_size > 1:
            raise Refused(
                "FaultTolerance(part=...)",
                f"in parallel mode {mode} ranks hold different parameters, and nothing says which hold the same",
                "name it on each rank: the same name for ranks with the same slices",
            )
        parameters = args.train_network.parameters_dict()
        if why := why_no_dump_of(parameters):
            raise Refused("FaultTolerance", why, "train without it")
        self._parameters = dict(parameters)
        framework = MindSpore(parameters, place.world_size, lambda: self._notes(args))
        part = self._part or WHOLE
        info = RankInfo(place.rank, place.host, os.getpid(), part, place.rank, (f"{part}/state",))
        deadlines = places.deadlines(self._settings, os.environ)
        member = Member(
            framework, info, deadlines, self._save, places.resume_words(os.environ), not self._part,
            Link(place.world_size, framework.agree, self._handler, self._why_no_link),
            pauses=self._switches.pause, dumps=self._switches.dump,
        )  # fmt: skip
        protection.protect(member, place, self._settings, mode)
        if place.rank == 0 and self._switches.dump and (warning := places.why_no_dying_gasp(os.environ)):
            logs.say(f"*** {warning} ***", sys.stderr)
        member.begin(self._base)
        self._member = member

    @staticmethod
    def _notes(args: Any) -> dict[str, Any]:
        """What MindFormers reads of a checkpoint when it resumes."""
        names = {"epoch_num": "cur_epoch_num", "step_num": "cur_step_num", "batch_num": "batch_num"}
        return {name: int(args.get(theirs) or 0) for name, theirs in names.items()}

    def _why_no_link(self) -> str:
        return protection.why_no_link(self._switches, self._handler)
