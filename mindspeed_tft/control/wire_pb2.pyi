# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankInfo(_message.Message):
    __slots__ = ("rank", "host", "pid", "part", "dp_rank", "holds", "needs")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    pid: int
    part: str
    dp_rank: int
    holds: _containers.RepeatedScalarFieldContainer[str]
    needs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., part: _Optional[str] = ..., dp_rank: _Optional[int] = ..., holds: _Optional[_Iterable[str]] = ..., needs: _Optional[_Iterable[str]] = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("rank", "step", "commit", "update", "fault", "trusted", "rng_start", "rng_end", "epoch", "checkpoints", "digests", "stamps", "saved")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class StampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SavedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_FIELD_NUMBER: _ClassVar[int]
    RNG_START_FIELD_NUMBER: _ClassVar[int]
    RNG_END_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    STAMPS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    commit: str
    update: str
    fault: str
    trusted: bool
    rng_start: str
    rng_end: str
    epoch: int
    checkpoints: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.ScalarMap[str, str]
    stamps: _containers.ScalarMap[str, str]
    saved: _containers.ScalarMap[str, str]
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., commit: _Optional[str] = ..., update: _Optional[str] = ..., fault: _Optional[str] = ..., trusted: _Optional[bool] = ..., rng_start: _Optional[str] = ..., rng_end: _Optional[str] = ..., epoch: _Optional[int] = ..., checkpoints: _Optional[_Iterable[int]] = ..., digests: _Optional[_Mapping[str, str]] = ..., stamps: _Optional[_Mapping[str, str]] = ..., saved: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Wish(_message.Message):
    __slots__ = ("id", "hold", "hold_from", "limit", "save", "save_from", "ranks", "working", "pending")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    HOLD_FROM_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FROM_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WORKING_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    id: int
    hold: int
    hold_from: int
    limit: float
    save: int
    save_from: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    working: bool
    pending: bool
    def __init__(self, id: _Optional[int] = ..., hold: _Optional[int] = ..., hold_from: _Optional[int] = ..., limit: _Optional[float] = ..., save: _Optional[int] = ..., save_from: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., working: _Optional[bool] = ..., pending: _Optional[bool] = ...) -> None: ...

class LinkState(_message.Message):
    __slots__ = ("name", "before", "since", "epoch", "unsettled")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    name: str
    before: str
    since: str
    epoch: int
    unsettled: int
    def __init__(self, name: _Optional[str] = ..., before: _Optional[str] = ..., since: _Optional[str] = ..., epoch: _Optional[int] = ..., unsettled: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "session", "info", "epoch", "parked", "bare", "doubt", "began", "wish", "held", "held_at", "link", "held_for")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    BARE_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_AT_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    HELD_FOR_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    session: str
    info: RankInfo
    epoch: int
    parked: bool
    bare: bool
    doubt: str
    began: bool
    wish: Wish
    held: int
    held_at: int
    link: LinkState
    held_for: float
    def __init__(self, protocol: _Optional[int] = ..., session: _Optional[str] = ..., info: _Optional[_Union[RankInfo, _Mapping]] = ..., epoch: _Optional[int] = ..., parked: _Optional[bool] = ..., bare: _Optional[bool] = ..., doubt: _Optional[str] = ..., began: _Optional[bool] = ..., wish: _Optional[_Union[Wish, _Mapping]] = ..., held: _Optional[int] = ..., held_at: _Optional[int] = ..., link: _Optional[_Union[LinkState, _Mapping]] = ..., held_for: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("rank", "step", "phase", "waiting", "pulse", "checkpoint", "one_way")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ONE_WAY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    phase: str
    waiting: bool
    pulse: int
    checkpoint: int
    one_way: bool
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., waiting: _Optional[bool] = ..., pulse: _Optional[int] = ..., checkpoint: _Optional[int] = ..., one_way: _Optional[bool] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("rank", "hold", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    hold: int
    step: int
    def __init__(self, rank: _Optional[int] = ..., hold: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("rank", "hold")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    hold: int
    def __init__(self, rank: _Optional[int] = ..., hold: _Optional[int] = ...) -> None: ...

class SavedStep(_message.Message):
    __slots__ = ("rank", "save", "step", "path", "why")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    save: int
    step: int
    path: str
    why: str
    def __init__(self, rank: _Optional[int] = ..., save: _Optional[int] = ..., step: _Optional[int] = ..., path: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class RankQuiet(_message.Message):
    __slots__ = ("rank", "seconds", "state")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    seconds: float
    state: str
    def __init__(self, rank: _Optional[int] = ..., seconds: _Optional[float] = ..., state: _Optional[str] = ...) -> None: ...

class Examined(_message.Message):
    __slots__ = ("rank", "pid", "spare", "stacks", "message")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    spare: str
    stacks: str
    message: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., spare: _Optional[str] = ..., stacks: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class FaultSeen(_message.Message):
    __slots__ = ("rank", "kind", "message", "own")
    RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    kind: str
    message: str
    own: bool
    def __init__(self, rank: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., own: _Optional[bool] = ...) -> None: ...

class RankLost(_message.Message):
    __slots__ = ("rank", "message", "pid", "info")
    RANK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    rank: int
    message: str
    pid: int
    info: RankInfo
    def __init__(self, rank: _Optional[int] = ..., message: _Optional[str] = ..., pid: _Optional[int] = ..., info: _Optional[_Union[RankInfo, _Mapping]] = ...) -> None: ...

class RankFinished(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class Reported(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: RankReport
    def __init__(self, report: _Optional[_Union[RankReport, _Mapping]] = ...) -> None: ...

class OrderDone(_message.Message):
    __slots__ = ("rank", "order", "ok", "message", "result")
    class ResultEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    order: int
    ok: bool
    message: str
    result: _containers.ScalarMap[str, str]
    def __init__(self, rank: _Optional[int] = ..., order: _Optional[int] = ..., ok: _Optional[bool] = ..., message: _Optional[str] = ..., result: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("epoch", "ranks", "reason", "doubt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    doubt: str
    def __init__(self, epoch: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., doubt: _Optional[str] = ...) -> None: ...

class TextList(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, items: _Optional[_Iterable[str]] = ...) -> None: ...

class TextMap(_message.Message):
    __slots__ = ("items",)
    class ItemsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.ScalarMap[str, str]
    def __init__(self, items: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("text", "number", "list", "map")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    text: str
    number: int
    list: TextList
    map: TextMap
    def __init__(self, text: _Optional[str] = ..., number: _Optional[int] = ..., list: _Optional[_Union[TextList, _Mapping]] = ..., map: _Optional[_Union[TextMap, _Mapping]] = ...) -> None: ...

class Examine(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class Kill(_message.Message):
    __slots__ = ("rank", "pid")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("id", "rank", "kind", "payload")
    class PayloadEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    id: int
    rank: int
    kind: str
    payload: _containers.MessageMap[str, Value]
    def __init__(self, id: _Optional[int] = ..., rank: _Optional[int] = ..., kind: _Optional[str] = ..., payload: _Optional[_Mapping[str, Value]] = ...) -> None: ...

class Note(_message.Message):
    __slots__ = ("stage", "text", "warn")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WARN_FIELD_NUMBER: _ClassVar[int]
    stage: str
    text: str
    warn: bool
    def __init__(self, stage: _Optional[str] = ..., text: _Optional[str] = ..., warn: _Optional[bool] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("outcome", "step", "summary")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    step: int
    summary: str
    def __init__(self, outcome: _Optional[str] = ..., step: _Optional[int] = ..., summary: _Optional[str] = ...) -> None: ...

class RankSays(_message.Message):
    __slots__ = ("seq", "hello", "heartbeat", "fault", "report", "done", "goodbye", "held", "released", "saved")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    hello: Hello
    heartbeat: Heartbeat
    fault: FaultSeen
    report: Reported
    done: OrderDone
    goodbye: RankFinished
    held: Held
    released: Released
    saved: SavedStep
    def __init__(self, seq: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., fault: _Optional[_Union[FaultSeen, _Mapping]] = ..., report: _Optional[_Union[Reported, _Mapping]] = ..., done: _Optional[_Union[OrderDone, _Mapping]] = ..., goodbye: _Optional[_Union[RankFinished, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., saved: _Optional[_Union[SavedStep, _Mapping]] = ...) -> None: ...

class FromRank(_message.Message):
    __slots__ = ("rank", "session", "says", "lost", "quiet", "examined")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SAYS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    session: str
    says: RankSays
    lost: RankLost
    quiet: RankQuiet
    examined: Examined
    def __init__(self, rank: _Optional[int] = ..., session: _Optional[str] = ..., says: _Optional[_Union[RankSays, _Mapping]] = ..., lost: _Optional[_Union[RankLost, _Mapping]] = ..., quiet: _Optional[_Union[RankQuiet, _Mapping]] = ..., examined: _Optional[_Union[Examined, _Mapping]] = ...) -> None: ...

class HostHello(_message.Message):
    __slots__ = ("protocol", "host", "node_rank", "pid", "run", "term", "lease")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    host: str
    node_rank: int
    pid: int
    run: str
    term: int
    lease: str
    def __init__(self, protocol: _Optional[int] = ..., host: _Optional[str] = ..., node_rank: _Optional[int] = ..., pid: _Optional[int] = ..., run: _Optional[str] = ..., term: _Optional[int] = ..., lease: _Optional[str] = ...) -> None: ...

class HostSays(_message.Message):
    __slots__ = ("hello", "ranks", "bye", "ended", "candidates")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    hello: HostHello
    ranks: _containers.RepeatedCompositeFieldContainer[FromRank]
    bye: bool
    ended: bool
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, hello: _Optional[_Union[HostHello, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[FromRank, _Mapping]]] = ..., bye: _Optional[bool] = ..., ended: _Optional[bool] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("index", "host", "address")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    index: int
    host: str
    address: str
    def __init__(self, index: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("candidates",)
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Redirect(_message.Message):
    __slots__ = ("term", "leader", "table")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    term: int
    leader: int
    table: Table
    def __init__(self, term: _Optional[int] = ..., leader: _Optional[int] = ..., table: _Optional[_Union[Table, _Mapping]] = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("version", "session", "info", "lost", "finished", "earlier", "before", "why", "bare")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BARE_FIELD_NUMBER: _ClassVar[int]
    version: int
    session: str
    info: RankInfo
    lost: str
    finished: bool
    earlier: _containers.RepeatedScalarFieldContainer[str]
    before: RankInfo
    why: str
    bare: bool
    def __init__(self, version: _Optional[int] = ..., session: _Optional[str] = ..., info: _Optional[_Union[RankInfo, _Mapping]] = ..., lost: _Optional[str] = ..., finished: _Optional[bool] = ..., earlier: _Optional[_Iterable[str]] = ..., before: _Optional[_Union[RankInfo, _Mapping]] = ..., why: _Optional[str] = ..., bare: _Optional[bool] = ...) -> None: ...

class Lead(_message.Message):
    __slots__ = ("protocol", "run", "term", "leader", "table", "lease", "epoch", "seats", "over", "shared")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run: str
    term: int
    leader: Candidate
    table: Table
    lease: str
    epoch: int
    seats: _containers.RepeatedCompositeFieldContainer[Seat]
    over: bool
    shared: bool
    def __init__(self, protocol: _Optional[int] = ..., run: _Optional[str] = ..., term: _Optional[int] = ..., leader: _Optional[_Union[Candidate, _Mapping]] = ..., table: _Optional[_Union[Table, _Mapping]] = ..., lease: _Optional[str] = ..., epoch: _Optional[int] = ..., seats: _Optional[_Iterable[_Union[Seat, _Mapping]]] = ..., over: _Optional[bool] = ..., shared: _Optional[bool] = ...) -> None: ...

class LeadHeard(_message.Message):
    __slots__ = ("term", "version", "refused", "sees_lease")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SEES_LEASE_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    refused: str
    sees_lease: bool
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., refused: _Optional[str] = ..., sees_lease: _Optional[bool] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("protected",)
    PROTECTED_FIELD_NUMBER: _ClassVar[int]
    protected: bool
    def __init__(self, protected: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protected", "term", "leader", "lease")
    PROTECTED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    protected: bool
    term: int
    leader: Candidate
    lease: str
    def __init__(self, protected: _Optional[bool] = ..., term: _Optional[int] = ..., leader: _Optional[_Union[Candidate, _Mapping]] = ..., lease: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GoodbyeSeen(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Parked(_message.Message):
    __slots__ = ("rank", "session", "reason")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    session: str
    reason: str
    def __init__(self, rank: _Optional[int] = ..., session: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("rank", "session")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    session: str
    def __init__(self, rank: _Optional[int] = ..., session: _Optional[str] = ...) -> None: ...

class Dismissed(_message.Message):
    __slots__ = ("rank", "session", "code", "reason")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    session: str
    code: int
    reason: str
    def __init__(self, rank: _Optional[int] = ..., session: _Optional[str] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class HostOrders(_message.Message):
    __slots__ = ("beat", "welcome", "refused", "stop", "order", "resync", "goodbye_seen", "examine", "kill", "parked", "admitted", "dismissed", "table", "redirect", "wish", "more")
    BEAT_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_SEEN_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    DISMISSED_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    REDIRECT_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    beat: Beat
    welcome: Welcome
    refused: Refused
    stop: Stop
    order: Order
    resync: Resync
    goodbye_seen: GoodbyeSeen
    examine: Examine
    kill: Kill
    parked: Parked
    admitted: Admitted
    dismissed: Dismissed
    table: Table
    redirect: Redirect
    wish: Wish
    more: _containers.RepeatedCompositeFieldContainer[HostOrders]
    def __init__(self, beat: _Optional[_Union[Beat, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., goodbye_seen: _Optional[_Union[GoodbyeSeen, _Mapping]] = ..., examine: _Optional[_Union[Examine, _Mapping]] = ..., kill: _Optional[_Union[Kill, _Mapping]] = ..., parked: _Optional[_Union[Parked, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., dismissed: _Optional[_Union[Dismissed, _Mapping]] = ..., table: _Optional[_Union[Table, _Mapping]] = ..., redirect: _Optional[_Union[Redirect, _Mapping]] = ..., wish: _Optional[_Union[Wish, _Mapping]] = ..., more: _Optional[_Iterable[_Union[HostOrders, _Mapping]]] = ...) -> None: ...

class OperatorAsks(_message.Message):
    __slots__ = ("protocol", "id", "kind", "args", "patience", "who")
    class ArgsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    id: str
    kind: str
    args: _containers.ScalarMap[str, str]
    patience: float
    who: str
    def __init__(self, protocol: _Optional[int] = ..., id: _Optional[str] = ..., kind: _Optional[str] = ..., args: _Optional[_Mapping[str, str]] = ..., patience: _Optional[float] = ..., who: _Optional[str] = ...) -> None: ...

class OperatorHears(_message.Message):
    __slots__ = ("text", "done", "of", "data", "last", "ok", "late", "leader")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    text: str
    done: int
    of: int
    data: bytes
    last: bool
    ok: bool
    late: bool
    leader: Candidate
    def __init__(self, text: _Optional[str] = ..., done: _Optional[int] = ..., of: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ..., ok: _Optional[bool] = ..., late: _Optional[bool] = ..., leader: _Optional[_Union[Candidate, _Mapping]] = ...) -> None: ...
