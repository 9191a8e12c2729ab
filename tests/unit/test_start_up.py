"""What a newcomer's communications return: the results of the first life, or those of peers that are equal to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_tft.encode import EncodeError
from mindspeed_tft.groups import start_up
from mindspeed_tft.groups.start_up import Answers, Journal

# What stands between the program and the journal is ours and no place in the program: so is this, by its module's name.
_BETWEEN = """
def first_life(journal, operation, args, results):
    entry = journal.expect("0", operation, args)
    for output, result in zip(tensors(args[0]), results, strict=True):
        output.copy_(result)  # the peers' part
    if entry is not None:
        entry.ended()

def in_first_life(journal):
    return lambda operation, args, results: first_life(journal, operation, args, results)

def in_second_life(answers):
    return lambda operation, args, results: answers.give("0", operation, args, 1)
"""
between: dict[str, Any] = {"__name__": "mindspeed_tft.between", "tensors": start_up.tensors}
exec(_BETWEEN, between)
first_life, in_first_life, in_second_life = (
    between[name] for name in ("first_life", "in_first_life", "in_second_life")
)


def program(run: Any, flag: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two broadcasts at different places; each life runs the same lines."""
    one, two = torch.tensor([flag]), torch.tensor([flag])
    run("broadcast", ([one],), [torch.tensor([1.0])])
    run("broadcast", ([two],), [torch.tensor([2.0])])
    return one, two


def test_the_results_of_the_first_life_come_again() -> None:
    journal = Journal()
    program(in_first_life(journal), 0.0)
    answers = Answers(journal.to_bytes)
    one, two = program(in_second_life(answers), 7.0)
    assert (one.item(), two.item(), answers.known, answers.guessed) == (1.0, 2.0, 2, 0)


def test_another_place_in_the_program_gets_nothing_of_it() -> None:
    journal = Journal()
    first_life(journal, "broadcast", ([torch.zeros(1)],), [torch.ones(1)])
    answers, mine = Answers(journal.to_bytes), torch.tensor([7.0])
    answers.give("0", "broadcast", ([mine],), 1)
    assert (mine.item(), answers.known, answers.guessed) == (7.0, 0, 1)


def test_results_of_one_place_come_in_their_order_and_by_form() -> None:
    journal = Journal()

    def loop(run: Any) -> list[torch.Tensor]:
        outputs = [torch.zeros(1), torch.zeros(2), torch.zeros(1)]
        for number, output in enumerate(outputs):
            run("allreduce", ([output],), [torch.full_like(output, number)])
        return outputs

    loop(in_first_life(journal))
    answers = Answers(journal.to_bytes)
    found = loop(in_second_life(answers))
    assert [output.tolist() for output in found] == [[0.0], [1.0, 1.0], [2.0]]


def test_large_results_and_what_nobody_waited_for_are_not_kept() -> None:
    journal = Journal()
    assert journal.expect("0", "broadcast", ([torch.zeros(start_up.KEPT_BYTES)],)) is None
    assert journal.expect("0", "barrier", ()) is None
    journal.expect("0", "broadcast", ([torch.zeros(1)],))  # never ended
    answers, mine = Answers(journal.to_bytes), torch.tensor([7.0])
    answers.give("0", "broadcast", ([mine],), 1)
    assert mine.item() == 7.0


def test_what_is_kept_in_all_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "KEPT_IN_ALL", 6)
    journal = Journal()
    program(in_first_life(journal), 0.0)
    answers = Answers(journal.to_bytes)
    one, two = program(in_second_life(answers), 7.0)
    assert (one.item(), two.item(), answers.known, answers.guessed) == (1.0, 7.0, 1, 1)


@pytest.mark.parametrize("operation", ["allgather", "_allgather_base"])
def test_what_thousands_of_ranks_gather_is_kept_once_for_all_that_are_equal(operation: str) -> None:
    """Descriptions of parameter groups: 100 bytes of each rank, of two kinds."""
    world, kinds = 4096, torch.randint(0, 255, (2, 100), dtype=torch.uint8)
    told = [kinds[rank % 3 % 2] for rank in range(world)]

    def gather(run: Any) -> list[torch.Tensor]:
        outputs = [torch.zeros(100, dtype=torch.uint8) for _ in range(world)]
        if operation == "allgather":
            run(operation, ([outputs], [kinds[0]]), told)
            return outputs
        whole = torch.cat(outputs)
        run(operation, (whole, kinds[0]), [torch.cat(told)])
        return list(torch.split(whole, 100))

    journal = Journal()
    gather(in_first_life(journal))
    assert len(journal.to_bytes()) < 2 * world
    answers = Answers(journal.to_bytes)
    found = gather(in_second_life(answers))
    assert answers.known == 1 and all(map(torch.equal, found, told))


def test_without_a_journal_all_peers_are_equal() -> None:
    answers = Answers(lambda: b"")
    lists = [[torch.zeros(2), torch.zeros(2)]]
    answers.give("0", "allgather", (lists, [torch.tensor([1.0, 2.0])]), 0)
    assert [tensor.tolist() for tensor in lists[0]] == [[1.0, 2.0]] * 2
    whole = torch.zeros(4)
    answers.give("0", "_allgather_base", (whole, torch.tensor([1.0, 2.0])), 0)
    assert whole.tolist() == [1.0, 2.0, 1.0, 2.0]
    part = torch.zeros(2)
    answers.give("0", "_reduce_scatter_base", (part, torch.arange(4.0)), 1)
    assert part.tolist() == [2.0, 3.0]
    (out,) = out_list = [torch.zeros(1)]
    answers.give("0", "reduce_scatter", (out_list, [[torch.tensor([1.0]), torch.tensor([2.0])]]), 1)
    assert out.item() == 2.0


def test_the_handle_is_over_at_once() -> None:
    work = Answers(lambda: b"").give("0", "allreduce", ([torch.ones(1)],), 0)
    assert work.wait() and work.is_completed() and work.is_success()
    assert work.get_future().wait()[0].item() == 1.0


def test_what_is_no_journal_is_refused() -> None:
    with pytest.raises(EncodeError):
        Answers(lambda: b"\x80\x04").give("0", "barrier", (), 0)
