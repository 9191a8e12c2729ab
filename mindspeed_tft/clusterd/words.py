"""The vocabulary of ClusterD's Recover service: signals, actions, strategies, codes, and what they mean to the engine.

Facts of an interface, no behaviour. Numbers of codes: 4xx are the client's (not to be sent again), 5xx may be.
"""

from __future__ import annotations

from dataclasses import dataclass

ROLE = "taskd"  # as which a job's client introduces itself
PORT = 8899

# signalType
STOP, GLOBAL, CHANGE, SAVE_AND_EXIT = "stopTrain", "globalFault", "changeStrategy", "saveAndExit"
KILL_MASTER, NODES_EXIT, PRE_EXIT, KEEP_ALIVE = "killMaster", "faultNodesExit", "preExitProcess", "keep-alive"
HOT_SWITCH, PAUSE_START, CONTINUE_START = "hot-switch", "pauseStartAgent", "continueStartAgent"
# Of these, why we do not do what they want.
REFUSED = {
    HOT_SWITCH: "a rank does not move to another node while it trains; drain the node instead",
    PAUSE_START: "launchers are not stopped from starting processes",
    CONTINUE_START: "launchers are not stopped from starting processes",
    NODES_EXIT: "training does not go on with fewer nodes (elastic training is not in this version)",
}

# actions
PAUSE_TRAIN, FAULT_NODES_EXIT, FAULT_NODES_RESTART = "pause_train", "fault_nodes_exit", "fault_nodes_restart"

# strategies
RETRY, RECOVER, IN_PLACE, DUMP, EXIT, CONTINUE = "retry", "recover", "recover-in-place", "dump", "exit", "continue"

# codes
OK, SUCCESS, ISOLATE = 0, 200, 201
SWITCHED_OFF, NOT_READY, RETRY_FAILED, UNRECOVERABLE, DUMP_FAILED, CLIENT_FAILED = 403, 404, 405, 406, 407, 499
CODES = {
    400: "not registered",
    401: "a report at the wrong time",
    402: "it does not know this job",
    403: "process recovery is switched off for this job",
    404: "processes are not ready",
    408: "Init is missing",
    409: "it does not understand the request",
    410: "too many requests",
    411: "another operation is running",
    429: "too many requests",
    500: "it has too many jobs",
    504: "its queue of signals is full",
    505: "its queue of events is full",
    506: "the event was cancelled",
    507: "a report came too late",
    599: "an internal error",
}

# faultType
MEMORY, OTHER, NETWORK = "0", "1", "2"
_TYPES = {"memory": MEMORY, "corrupted": MEMORY, "precision": MEMORY, "link": NETWORK}
_KINDS = {MEMORY: "memory", NETWORK: "link", OTHER: "process"}


def succeeded(code: int) -> bool:
    return code in (OK, SUCCESS, ISOLATE)


def code_words(code: int) -> str:
    """A code as a reader wants it."""
    return f"{code} ({CODES[code]})" if code in CODES else str(code)


def fault_type(kind: str) -> str:
    """The type of a fault on the wire. Wrong numbers are of the retryable one: they are answered without a restart."""
    return _TYPES.get(kind, OTHER)


def fault_kind(fault: str) -> str:
    """The kind of a fault, as `engine.types.Told` wants it. An unknown type is any other."""
    return _KINDS.get(fault, _KINDS[OTHER])


@dataclass(frozen=True)
class Signal:
    """What ClusterD wants of the job (ProcessManageSignal)."""

    uuid: str
    kind: str
    actions: tuple[str, ...] = ()
    faults: tuple[tuple[int, str], ...] = ()  # (rank, type)
    strategy: str = ""
    timeout: int = 0  # seconds; 0: none given
    nodes: tuple[int, ...] = ()
    extra: str = ""


@dataclass(frozen=True)
class Report:
    """A request to be sent: the method of the service, and what it says."""

    method: str
    code: int = OK
    info: str = ""
    faults: tuple[tuple[int, str], ...] = ()  # (rank, type)
    strategies: tuple[str, ...] = ()
    strategy: str = ""
