"""Engine types <-> wire messages. Total: what has no place on the wire, or comes from it malformed, is a WireError."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import fields
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.incident import EXIT_MOVED, EXIT_REBORN

PROTOCOL = 4
MAX_TEXT = 64 * 1024

M = TypeVar("M", bound=Message)
Payload = dict[str, str | int | list[str] | dict[str, str]]


class WireError(ValueError):
    """A value that cannot be said on the wire, or a message that makes no sense."""


def parse(kind: type[M], data: bytes) -> M:
    """The message in these bytes."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error
    return message


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Text that any peer can decode, and no longer than a report needs: error texts come from anywhere."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= limit else text[:limit] + f"... ({len(text) - limit} characters cut)"


def line(text: str, limit: int = 200) -> str:
    """What a peer may have said, as a part of one line of a log: nobody writes lines there that are not ours."""
    if not text.isprintable():
        text = "".join(ascii(c)[1:-1] if _is_control(c) else c for c in text[: limit + 1])
    return clean(text, limit)


def _is_control(character: str) -> bool:
    return not character.isprintable() and unicodedata.category(character) != "Zs"  # of those are odd spaces, too


# ------------------------------------------------------------------------------------------ what ranks say


def info_to_wire(info: t.RankInfo) -> wire.RankInfo:
    return wire.RankInfo(
        rank=info.rank,
        host=info.host,
        pid=info.pid,
        part=info.part,
        dp_rank=info.dp_rank,
        holds=info.holds,
        needs=info.needs,
    )


def info_from_wire(m: wire.RankInfo) -> t.RankInfo:
    return t.RankInfo(m.rank, m.host, m.pid, m.part, m.dp_rank, tuple(m.holds), tuple(m.needs))


def report_to_wire(r: t.RankReport) -> wire.RankReport:
    return wire.RankReport(
        rank=r.rank,
        step=r.step,
        commit=r.commit.value,
        update=r.update.value,
        fault=clean(r.fault),
        trusted=r.trusted,
        rng_start=r.rng_start,
        rng_end=r.rng_end,
        epoch=r.epoch,
        checkpoints=r.checkpoints,
        digests=r.digests,
        stamps=r.stamps,
        saved=r.saved,
    )


def report_from_wire(m: wire.RankReport) -> t.RankReport:
    try:
        commit, update = t.Commit(m.commit), t.Update(m.update)
    except ValueError as error:
        raise WireError(f"report of rank {m.rank}: {error}") from error
    return t.RankReport(
        m.rank,
        m.step,
        commit,
        update,
        m.fault,
        m.trusted,
        m.rng_start,
        m.rng_end,
        m.epoch,
        tuple(m.checkpoints),
        dict(m.digests),
        dict(m.stamps),
        dict(m.saved),
    )


def hello(
    session: str,
    info: t.RankInfo,
    epoch: int = 0,
    parked: bool = False,
    bare: bool = False,
    doubt: str = "",
    began: bool = False,
    wish: t.Wish | None = None,
    held: tuple[int, int, float] = (0, 0, 0.0),
    link: t.LinkState | None = None,
) -> wire.RankSays:
    """`epoch`: of the last stop that this process heard, and `doubt` what stops told it of the numbers of all ranks;
    `parked`: it knows that another one has its place; `bare`: it was started in the place of another one, and has none
    of its state yet; `began`: it has begun a step; `wish`: the last one that it heard; `held`: the hold that it is in,
    after which step, and for how many seconds so far; `link`: of its collectives, once it was moved."""
    told = wire.Hello(protocol=PROTOCOL, session=session, info=info_to_wire(info), epoch=epoch)
    told.parked, told.bare, told.doubt, told.began = parked, bare, doubt, began
    told.held, told.held_at, told.held_for = held
    if wish is not None and wish.id:
        told.wish.CopyFrom(wish_to_wire(wish))
    if link is not None and link != t.LinkState():
        told.link.CopyFrom(wire.LinkState(**vars(link)))
    return wire.RankSays(hello=told)


def says(event: t.Event, seq: int = 0) -> wire.RankSays:
    """What a rank says of itself. Registration is `hello`, because it needs the session."""
    if isinstance(event, t.Heartbeat):
        body = wire.Heartbeat(
            rank=event.rank, step=event.step, phase=clean(event.phase), waiting=event.waiting, pulse=event.pulse,
            checkpoint=event.checkpoint, one_way=event.one_way,
        )  # fmt: skip
        return wire.RankSays(seq=seq, heartbeat=body)
    if isinstance(event, t.FaultSeen):
        fault = wire.FaultSeen(rank=event.rank, kind=event.kind, message=clean(event.message), own=event.own)
        return wire.RankSays(seq=seq, fault=fault)
    if isinstance(event, t.Reported):
        return wire.RankSays(seq=seq, report=wire.Reported(report=report_to_wire(event.report)))
    if isinstance(event, t.OrderDone):
        result = {clean(k): clean(v) for k, v in event.result.items()}
        done = wire.OrderDone(
            rank=event.rank, order=event.order, ok=event.ok, message=clean(event.message), result=result
        )
        return wire.RankSays(seq=seq, done=done)
    if isinstance(event, t.RankFinished):
        return wire.RankSays(seq=seq, goodbye=wire.RankFinished(rank=event.rank))
    if isinstance(event, t.Held):
        return wire.RankSays(seq=seq, held=wire.Held(rank=event.rank, hold=event.hold, step=event.step))
    if isinstance(event, t.Released):
        return wire.RankSays(seq=seq, released=wire.Released(rank=event.rank, hold=event.hold))
    if isinstance(event, t.SavedStep):
        saved = wire.SavedStep(
            rank=event.rank, save=event.save, step=event.step, path=clean(event.path), why=clean(event.why)
        )
        return wire.RankSays(seq=seq, saved=saved)
    raise WireError(f"a rank does not say {type(event).__name__}")


def event_from_wire(m: wire.RankSays, at: float) -> t.Event:
    """The event that a rank's word means, seen at `at`."""
    kind = m.WhichOneof("body")
    if kind == "hello":
        if m.hello.protocol != PROTOCOL:
            raise WireError(f"protocol {m.hello.protocol}, this side speaks {PROTOCOL}")
        hello, wish = m.hello, wish_from_wire(m.hello.wish)
        link = t.LinkState(*(getattr(hello.link, each.name) for each in fields(t.LinkState)))
        told = (hello.epoch, hello.bare, hello.doubt, hello.began, wish, hello.held, hello.held_at, link)
        return t.Registered(at, info_from_wire(hello.info), *told, held_for=hello.held_for)
    if kind == "heartbeat":
        beat = m.heartbeat
        return t.Heartbeat(
            at, beat.rank, beat.step, beat.phase, beat.waiting, beat.pulse, beat.checkpoint, beat.one_way
        )
    if kind == "fault":
        return t.FaultSeen(at, m.fault.rank, m.fault.kind, m.fault.message, m.fault.own)
    if kind == "report":
        return t.Reported(at, report_from_wire(m.report.report))
    if kind == "done":
        return t.OrderDone(at, m.done.rank, m.done.order, m.done.ok, m.done.message, dict(m.done.result))
    if kind == "goodbye":
        return t.RankFinished(at, m.goodbye.rank)
    if kind == "held":
        return t.Held(at, m.held.rank, m.held.hold, m.held.step)
    if kind == "released":
        return t.Released(at, m.released.rank, m.released.hold)
    if kind == "saved":
        return t.SavedStep(at, m.saved.rank, m.saved.save, m.saved.step, m.saved.path, m.saved.why)
    raise WireError("a rank said nothing that we know")


def speaker(event: t.Event) -> int:
    """The rank that an event is about."""
    if isinstance(event, t.Registered):
        return event.info.rank
    if isinstance(event, t.Reported):
        return event.report.rank
    if isinstance(event, (t.Heartbeat, t.FaultSeen, t.RankLost, t.RankFinished, t.OrderDone)):
        return event.rank
    if isinstance(event, (t.Held, t.Released, t.SavedStep)):
        return event.rank
    raise WireError(f"{type(event).__name__} is about no rank")


def lost_to_wire(event: t.RankLost, session: str, info: wire.RankInfo | None = None) -> wire.FromRank:
    """What a relay says of a rank that cannot speak any more; `info` as it had registered."""
    body = wire.RankLost(rank=event.rank, message=clean(event.message), pid=event.pid, info=info)
    return wire.FromRank(rank=event.rank, session=session, lost=body)


def lost_from_wire(m: wire.FromRank, at: float) -> t.RankLost:
    if m.lost.HasField("info") and m.lost.info.rank != m.rank:
        raise WireError(f"loss of rank {m.lost.info.rank} under the name of rank {m.rank}")
    return t.RankLost(at, m.rank, m.lost.message, m.lost.pid)


def witness_to_wire(event: t.RankQuiet | t.Examined, session: str) -> wire.FromRank:
    """What a relay says of a rank that lives."""
    if isinstance(event, t.RankQuiet):
        quiet = wire.RankQuiet(rank=event.rank, seconds=event.seconds, state=event.state)
        return wire.FromRank(rank=event.rank, session=session, quiet=quiet)
    examined = wire.Examined(
        rank=event.rank,
        pid=event.pid,
        spare=clean(event.spare),
        stacks=clean(event.stacks),
        message=clean(event.message),
    )
    return wire.FromRank(rank=event.rank, session=session, examined=examined)


def witness_from_wire(m: wire.FromRank, at: float) -> t.RankQuiet | t.Examined:
    if m.WhichOneof("body") == "quiet":
        return t.RankQuiet(at, m.rank, m.quiet.seconds, m.quiet.state)
    found = m.examined
    return t.Examined(at, m.rank, found.pid, found.spare, found.stacks, found.message)


# ------------------------------------------------------------------------------------------ what ranks are told


def stop_to_wire(stop: t.Stop) -> wire.Stop:
    words = {"reason": clean(stop.reason), "doubt": clean(stop.doubt)}
    return wire.Stop(epoch=stop.epoch, ranks=list(stop.ranks), **words)


def stop_from_wire(m: wire.Stop) -> t.Stop:
    return t.Stop(m.epoch, tuple(m.ranks), m.reason, m.doubt)


def wish_to_wire(wish: t.Wish, ranks: Iterable[int] = ()) -> wire.Wish:
    """`ranks`: for whom it is, on its way down."""
    return wire.Wish(**vars(wish), ranks=list(ranks))


def wish_from_wire(m: wire.Wish) -> t.Wish:
    return t.Wish(m.id, m.hold, m.hold_from, m.limit, m.save, m.save_from, m.working, m.pending)


def order_to_wire(order: t.Order) -> wire.Order:
    payload = {key: _value_to_wire(key, value) for key, value in order.payload.items()}
    return wire.Order(id=order.id, rank=order.rank, kind=order.kind.value, payload=payload)


def ends_the_job(m: wire.Order) -> bool:
    """It tells a rank to leave, and no other process will come in its place."""
    coming_back = (EXIT_REBORN, EXIT_MOVED)
    return m.kind == t.OrderKind.EXIT.value and m.payload["code"].number not in coming_back


def order_from_wire(m: wire.Order) -> t.Order:
    try:
        kind = t.OrderKind(m.kind)
    except ValueError as error:
        raise WireError(f"order {m.id}: {error}") from error
    payload: Payload = {key: _value_from_wire(key, value) for key, value in m.payload.items()}
    return t.Order(m.id, m.rank, kind, payload)


def _value_to_wire(key: str, value: str | int | list[str] | dict[str, str]) -> wire.Value:
    if isinstance(value, str):
        return wire.Value(text=clean(value))
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise WireError(f"payload {key}: {value} does not fit in 64 bits")
        return wire.Value(number=value)
    if isinstance(value, dict):
        return wire.Value(map=wire.TextMap(items=value))
    if isinstance(value, list):
        return wire.Value(list=wire.TextList(items=value))
    raise WireError(f"payload {key}: {type(value).__name__} has no place on the wire")


def _value_from_wire(key: str, m: wire.Value) -> str | int | list[str] | dict[str, str]:
    kind = m.WhichOneof("kind")
    if kind == "text":
        return str(m.text)
    if kind == "number":
        return int(m.number)
    if kind == "list":
        return list(m.list.items)
    if kind == "map":
        return dict(m.map.items)
    raise WireError(f"payload {key} has no value")


# ------------------------------------------------------------------------------------------ what relays are told


def examine_to_wire(action: t.Examine) -> wire.Examine:
    return wire.Examine(rank=action.rank)


def examine_from_wire(m: wire.Examine) -> t.Examine:
    return t.Examine(m.rank)


def kill_to_wire(action: t.Kill) -> wire.Kill:
    return wire.Kill(rank=action.rank, pid=action.pid)


def kill_from_wire(m: wire.Kill) -> t.Kill:
    return t.Kill(m.rank, m.pid)


# ------------------------------------------------------------------------------------------ what the log keeps


def note_to_wire(note: t.Note) -> wire.Note:
    return wire.Note(stage=note.stage, text=clean(note.text), warn=note.warn)


def note_from_wire(m: wire.Note) -> t.Note:
    return t.Note(m.stage, m.text, m.warn)


def closed_to_wire(closed: t.Closed) -> wire.Closed:
    return wire.Closed(outcome=closed.outcome, step=closed.step, summary=clean(closed.summary))


def closed_from_wire(m: wire.Closed) -> t.Closed:
    return t.Closed(m.outcome, m.step, m.summary)
