"""The vocabulary of `mindio_ttp` that its adaptors use: enumerations, error texts, what the facade refuses. Pure.

The names are an interface, and are quoted because existing adaptors import them.
"""

from __future__ import annotations

from enum import Enum


class OptimizerType(Enum):
    """Which optimizer of a rank is meant; also the position of its entry in `tft_set_optimizer_replica`."""

    ATTENTION = 0
    MOE = 1


class RepairType(Enum):
    """What a rank does in a repair: `repair_info["repair_type"]` is one of these values."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


class Action(Enum):
    """What a rank that asked `tft_wait_next_action` does next."""

    RETRY = 0
    EXIT = 1


class ReportState(Enum):
    """What a rank says of itself in `tft_report_error`."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class FacadeError(RuntimeError):
    """Something that an adaptor asked of the facade is wrong, or not possible: what, why, and what to do."""


class NotServed(FacadeError):
    """A name of `mindio_ttp` whose meaning our engine does not have. Refused, never ignored."""

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"{name} is not served by the mindspeed_tft facade: {reason}; {remedy}")


# Kinds of faults (`faults.classify.KINDS`) by the state that an adaptor reports.
KIND_OF_STATE = {
    ReportState.RS_NORMAL: "stopped",
    ReportState.RS_RETRY: "precision",
    ReportState.RS_UCE: "memory",
    ReportState.RS_UCE_CORRUPTED: "corrupted",
    ReportState.RS_HCCL_FAILED: "link",
    ReportState.RS_UNKNOWN: "exception",
}

FORCE_STOP = "FORCE STOP"  # an adaptor's training loop is told so that it has to stop
REBOOTED = "ARF FINISH"  # a process that was started again says so that its start-up is over

# Kinds by the text of an exception, in the order in which they are looked for. All but the dated one.
TEXTS: tuple[tuple[str, str], ...] = (
    ("UCE ERROR", "memory"),
    ("HBM MULTI BIT ECC", "dated"),
    (FORCE_STOP, "stopped"),
    ("HCCL OP RETRY FAILED", "link"),
    ("SUSPECT REMOTE ERROR", "link"),
    ("UB LINK ERROR", "link"),
    ("HCCS LINK ERROR", "link"),
)

MAX_WORLD = 100_000
EXPORTS = ("MindSpeed", "MindSpeed-LLM")

# What is not served: name -> reason, remedy.
NOT_SERVED: dict[str, tuple[str, str]] = {
    "tft_register_zit_downgrade_rebuild_handler": (
        "elastic training is not in this version",
        "leave out --enable-elastic-training",
    ),
    "tft_register_zit_upgrade_rebuild_handler": (
        "elastic training is not in this version",
        "leave out --enable-elastic-training",
    ),
    "tft_register_zit_upgrade_repair_handler": (
        "elastic training is not in this version",
        "leave out --enable-elastic-training",
    ),
    "tft_register_zit_upgrade_rollback_handler": (
        "elastic training is not in this version",
        "leave out --enable-elastic-training",
    ),
    "tft_register_decrypt_handler": (
        "keys are read from files by the processes of the control plane, which run no code of the adaptor",
        "set tft-tls-dir, and tft-tls-decrypt or tft-tls-key-password-file, in the facade's configuration",
    ),
    "tft_start_copy_os": (
        "there are no local copies of optimizer states",
        "initialize with enable_local_copy=False",
    ),
    "tft_register_mindx_callback": ("decisions are the engine's, no platform is asked", "read events.jsonl instead"),
    "tft_notify_controller_stop_train": ("decisions are the engine's, no platform is heard", "send SIGTERM to a rank"),
    "tft_notify_controller_on_global_rank": ("decisions are the engine's, no platform is heard", "leave it out"),
    "tft_notify_controller_prepare_action": ("there is no hot switch", "kill the rank, and let tftrun replace it"),
    "tft_notify_controller_change_strategy": ("decisions are the engine's, no platform is heard", "leave it out"),
    "tft_notify_controller_dump": (
        "no callback saves while training goes on",
        "send SIGTERM to a rank: the job saves, and leaves",
    ),
}


def refuse(name: str) -> NotServed:
    """The refusal of a name in `NOT_SERVED`."""
    return NotServed(name, *NOT_SERVED[name])
