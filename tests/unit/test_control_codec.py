"""The words on the wire: round trips, limits, garbage."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tft.control import codec, framing, generate
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.engine import types as t

M = TypeVar("M", bound=Message)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ranks = st.integers(0, 2**31 - 1)
steps = st.integers(-1, 2**62)
infos = st.builds(
    t.RankInfo, ranks, texts, st.integers(0, 2**31), texts, st.integers(0, 4096), st.lists(texts).map(tuple)
)
reports = st.builds(
    t.RankReport,
    rank=ranks,
    step=steps,
    commit=st.sampled_from(t.Commit),
    update=st.sampled_from(t.Update),
    fault=texts,
    trusted=st.booleans(),
    rng_start=texts,
    rng_end=texts,
    epoch=steps,
    checkpoints=st.lists(steps, max_size=5).map(tuple),
)
texts_by_text = st.dictionaries(texts, texts, max_size=5)
rank_events = st.one_of(
    st.builds(
        t.Heartbeat, st.just(1.5), ranks, steps, texts, st.booleans(), st.integers(0, 2**32 - 1), steps, st.booleans()
    ),
    st.builds(t.Held, st.just(1.5), ranks, steps, steps),
    st.builds(t.Released, st.just(1.5), ranks, steps),
    st.builds(t.SavedStep, st.just(1.5), ranks, steps, steps, texts),
    st.builds(t.FaultSeen, st.just(1.5), ranks, texts, texts, st.booleans()),
    st.builds(t.RankFinished, st.just(1.5), ranks),
    st.builds(t.Reported, st.just(1.5), reports),
    st.builds(t.OrderDone, st.just(1.5), ranks, steps, st.booleans(), texts, texts_by_text),
)
wishes = st.builds(t.Wish, steps, steps, steps, st.floats(0, 1e6), steps, steps, st.booleans(), st.booleans())
links = st.builds(t.LinkState, texts, texts, texts, steps, steps)
payloads = st.dictionaries(
    texts, st.one_of(texts, st.integers(-(2**63), 2**63 - 1), st.lists(texts, max_size=5), texts_by_text), max_size=5
)


def over_the_wire(m: M) -> M:
    return codec.parse(type(m), m.SerializeToString())


@given(rank_events, st.integers(0, 2**63))
def test_what_a_rank_says_comes_back(event: t.Event, seq: int) -> None:
    message = over_the_wire(codec.says(event, seq))
    assert codec.event_from_wire(message, 1.5) == event
    assert message.seq == seq


@given(infos, texts)
def test_a_registration_comes_back(info: t.RankInfo, session: str) -> None:
    message = over_the_wire(codec.hello(session, info))
    assert message.hello.session == session
    assert codec.event_from_wire(message, 2.0) == t.Registered(2.0, info)


@given(infos, links)
def test_the_link_that_a_rank_knows_comes_back(info: t.RankInfo, link: t.LinkState) -> None:
    message = over_the_wire(codec.hello("s", info, link=link))
    assert codec.event_from_wire(message, 2.0) == t.Registered(2.0, info, link=link)


@given(infos, wishes.filter(lambda wish: wish.id > 0), steps, steps)
def test_what_a_rank_knows_of_operators_comes_back(info: t.RankInfo, wish: t.Wish, held: int, step: int) -> None:
    message = over_the_wire(codec.hello("s", info, wish=wish, held=(held, step, 1.5)))
    told = t.Registered(2.0, info, wish=wish, held=held, held_at=step, held_for=1.5)
    assert codec.event_from_wire(message, 2.0) == told
    down = over_the_wire(codec.wish_to_wire(wish, [3, 5]))
    assert (codec.wish_from_wire(down), list(down.ranks)) == (wish, [3, 5])


@given(st.integers(0, 2**62), st.lists(ranks).map(tuple), texts)
def test_a_stop_comes_back(epoch: int, told: tuple[int, ...], reason: str) -> None:
    stop = t.Stop(epoch, told, reason)
    assert codec.stop_from_wire(over_the_wire(codec.stop_to_wire(stop))) == stop


@given(st.integers(0, 2**62), ranks, st.sampled_from(t.OrderKind), payloads)
def test_an_order_comes_back(number: int, rank: int, kind: t.OrderKind, payload: codec.Payload) -> None:
    order = t.Order(number, rank, kind, payload)
    back = codec.order_from_wire(over_the_wire(codec.order_to_wire(order)))
    assert back == order
    assert {k: type(v) for k, v in back.payload.items()} == {k: type(v) for k, v in payload.items()}


@given(ranks, texts, st.integers(0, 2**31), texts)
def test_a_loss_comes_back(rank: int, message: str, pid: int, session: str) -> None:
    lost = t.RankLost(3.0, rank, message, pid)
    assert codec.lost_from_wire(over_the_wire(codec.lost_to_wire(lost, session)), 3.0) == lost


@given(ranks, st.floats(0, 1e9), texts, st.integers(0, 2**31), texts, texts, texts)
def test_what_a_relay_says_of_a_rank_comes_back(
    rank: int, seconds: float, state: str, pid: int, spare: str, stacks: str, session: str
) -> None:
    for event in (t.RankQuiet(4.0, rank, seconds, state), t.Examined(4.0, rank, pid, spare, stacks, state)):
        message = over_the_wire(codec.witness_to_wire(event, session))
        assert codec.witness_from_wire(message, 4.0) == event
        assert message.session == session


@given(ranks, st.integers(0, 2**31))
def test_what_a_relay_is_told_comes_back(rank: int, pid: int) -> None:
    assert codec.examine_from_wire(over_the_wire(codec.examine_to_wire(t.Examine(rank)))) == t.Examine(rank)
    assert codec.kill_from_wire(over_the_wire(codec.kill_to_wire(t.Kill(rank, pid)))) == t.Kill(rank, pid)


@given(texts, texts, st.booleans(), steps)
def test_notes_and_ends_come_back(stage: str, text: str, warn: bool, step: int) -> None:
    note, closed = t.Note(stage, text, warn), t.Closed(stage, step, text)
    assert codec.note_from_wire(over_the_wire(codec.note_to_wire(note))) == note
    assert codec.closed_from_wire(over_the_wire(codec.closed_to_wire(closed))) == closed


def test_every_type_of_the_engine_has_a_place() -> None:
    """A new event or action must not be forgotten here. Ticks, notes, endings and what a cluster
    manager says are the controller's own."""
    known = {
        t.Registered, t.Heartbeat, t.FaultSeen, t.RankLost, t.RankFinished, t.Reported, t.OrderDone, t.Tick,
        t.RankQuiet, t.Examined, t.Stop, t.Order, t.Examine, t.Kill, t.Note, t.Recovered, t.Closed,
        t.Held, t.Released, t.SavedStep, t.Asked, t.Withdrawn, t.Tell, t.Progress, t.Answer,
        t.Steered, t.Told, t.Advised, t.Consult, t.Unadvised,
    }  # fmt: skip
    assert {*t.Event.__subclasses__(), *t.Action.__subclasses__()} == known


KINDS = [t.RankInfo, t.RankReport, t.Heartbeat, t.FaultSeen, t.RankLost, t.OrderDone, t.Stop, t.Order]
KINDS += [t.RankQuiet, t.Examined, t.Examine, t.Kill, t.Held, t.Released, t.SavedStep, t.Wish]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_place(kind: type) -> None:
    """A field with a default would be lost without a word. `at` is the controller's own."""
    message = getattr(wire, kind.__name__)
    ours = {field.name for field in dataclasses.fields(kind)} - {"at"}
    assert ours <= set(message.DESCRIPTOR.fields_by_name), "and vary it in the round trips above"


def test_text_that_is_no_utf8_and_endless_text() -> None:
    event = t.FaultSeen(0.0, 1, "exception", "file \udcff" + "x" * 200_000, True)
    back = codec.event_from_wire(over_the_wire(codec.says(event)), 0.0)
    assert isinstance(back, t.FaultSeen)
    assert back.message.startswith("file \\udcff")
    assert "characters cut" in back.message
    assert len(back.message) < 70_000


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1.5, None, (1, 2)])
def test_a_payload_without_a_place_is_an_error(value: object) -> None:
    order = t.Order(1, 0, t.OrderKind.EXIT, {"code": value})  # type: ignore[dict-item]
    with pytest.raises(codec.WireError, match="code"):
        codec.order_to_wire(order)


def test_unknown_words_are_errors() -> None:
    with pytest.raises(codec.WireError, match="order 3"):
        codec.order_from_wire(wire.Order(id=3, kind="fly"))
    with pytest.raises(codec.WireError, match="rank 4"):
        codec.report_from_wire(wire.RankReport(rank=4, commit="perhaps", update="done"))
    with pytest.raises(codec.WireError, match="protocol 99"):
        codec.event_from_wire(wire.RankSays(hello=wire.Hello(protocol=99)), 0.0)
    with pytest.raises(codec.WireError):
        codec.event_from_wire(wire.RankSays(), 0.0)
    with pytest.raises(codec.WireError):
        codec.order_from_wire(wire.Order(id=3, kind="exit", payload={"a": wire.Value()}))
    with pytest.raises(codec.WireError):
        codec.says(t.Tick(0.0))


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error_or_a_message(data: bytes) -> None:
    with contextlib.suppress(codec.WireError):
        codec.event_from_wire(codec.parse(wire.RankSays, data), 0.0)


@given(st.lists(st.text(max_size=50), max_size=8), st.integers(1, 40))
def test_frames_come_out_whole_however_they_are_cut(reasons: list[str], size: int) -> None:
    messages = [wire.Refused(reason=codec.clean(reason)) for reason in reasons]
    stream = b"".join(framing.pack(message) for message in messages)
    reader = framing.FrameReader()
    found: list[wire.Refused] = []
    for at in range(0, len(stream), size):
        found += [codec.parse(wire.Refused, frame) for frame in reader.feed(stream[at : at + size])]
    assert found == messages


def test_frames_over_the_limit() -> None:
    message = wire.Refused(reason="x" * 100)
    with pytest.raises(framing.FrameError, match="limit of 50"):
        framing.pack(message, 50)
    with pytest.raises(framing.FrameError, match="limit of 50"):
        list(framing.FrameReader(50).feed(framing.pack(message)))


@pytest.mark.parametrize("proto", generate.PROTOS, ids=lambda path: path.stem)
def test_the_generated_code_is_of_this_proto(proto: Path) -> None:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    fresh = generate.generate(proto)
    # The text depends on the release of protoc; what counts is the descriptor that it carries.
    name = ".".join(proto.relative_to(generate.ROOT).with_suffix("").parts)
    carried = importlib.import_module(f"{name}_pb2").DESCRIPTOR.serialized_pb
    text = next(text for path, text in fresh.items() if path.suffix == ".py")
    line = next(row for row in text.splitlines() if "AddSerializedFile(" in row)
    expected = ast.literal_eval(line.partition("AddSerializedFile(")[2].removesuffix(")"))
    assert carried == expected, "run: python -m mindspeed_tft.control.generate"


def test_a_rank_imports_no_grpc() -> None:
    code = (
        "import sys; import mindspeed_tft.control.processor, mindspeed_tft.control.launch; "
        "print([m for m in sys.modules if m.split('.')[0] == 'grpc'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[] False"
