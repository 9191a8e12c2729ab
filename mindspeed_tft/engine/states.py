"""Where a job stands, in one word. What leads from one to the other is `machine`'s and `stops`' affair."""

from __future__ import annotations

from enum import Enum

from mindspeed_tft.engine import dump, repair


class State(str, Enum):
    """Where the job stands."""

    STARTING = "starting"  # not every rank has registered: there is no step that could be saved
    TRAINING = "training"
    STOPPING = "stopping"  # ranks leave their collectives and report
    CONSULTING = "consulting"  # a cluster manager is to decide
    WAITING = "waiting"  # for processes that stand for those that are gone
    PLANNING = "planning"  # an attempt failed, the next tick plans again
    FINISHING = "finishing"
    STAGING = "staging"
    WRITING = "writing"
    PUBLISHING = "publishing"
    REGROUPING = "regrouping"
    REPAIRING = "repairing"
    ROLLING_BACK = "rolling_back"
    LOADING = "loading"
    RESUMING = "resuming"
    EXITING = "exiting"
    CLOSED = "closed"


OF_DUMP = {
    dump.Stage.DECIDE: State.PLANNING,
    dump.Stage.FINISH: State.FINISHING,
    dump.Stage.STAGE: State.STAGING,
    dump.Stage.WRITE: State.WRITING,
    dump.Stage.PUBLISH: State.PUBLISHING,
}
OF_REPAIR = {
    repair.Stage.DECIDE: State.PLANNING,
    repair.Stage.FINISH: State.FINISHING,
    repair.Stage.REGROUP: State.REGROUPING,
    repair.Stage.REPAIR: State.REPAIRING,
    repair.Stage.ROLLBACK: State.ROLLING_BACK,
    repair.Stage.LOAD: State.LOADING,
    repair.Stage.RESUME: State.RESUMING,
    repair.Stage.DONE: State.TRAINING,
}
