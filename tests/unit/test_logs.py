"""How lines are formatted, and which facts they carry."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from mindspeed_tft.observe import logs


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """The logger of the package as it was."""
    logger = logging.getLogger(logs.NAME)
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logs.install("text")
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
    logs.unbind()


def lines(style: logs.Format, role: str = "") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    logs.install(style, role, stream)
    return logging.getLogger("mindspeed_tft.recovery.session"), stream


def test_readable_lines_say_who_and_where() -> None:
    log, stream = lines("text")
    step = [0]
    logs.bind(rank=0, host="a", step=lambda: step[0], epoch=0, incident=lambda: 0)
    log.info("begins")
    step[0] = 7
    log.warning("100%% %s", "sure")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("[mindspeed_tft rank 0 host a] 20") and first.endswith(" INFO begins")
    assert second.startswith("[mindspeed_tft rank 0 host a step 7] ") and second.endswith(" WARNING 100% sure")


def test_json_lines_are_one_object_each() -> None:
    log, stream = lines("json", "controller")
    logs.bind(host="a", epoch=3, incident=2)
    log.warning('two\nlines and a "quote"')
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time") > 1_700_000_000
    assert first == {
        "level": "WARNING", "role": "controller", "host": "a", "epoch": 3, "incident": 2,
        "message": 'two\nlines and a "quote"', "logger": "mindspeed_tft.recovery.session",
    }  # fmt: skip
    assert second["level"] == "ERROR" and second["error"].endswith("ValueError: no")


def test_a_fact_that_cannot_be_told_costs_no_line() -> None:
    log, stream = lines("text")
    link = None
    logs.bind(rank=1, step=lambda: link.step)  # type: ignore[attr-defined]
    log.info("here")
    assert stream.getvalue().startswith("[mindspeed_tft rank 1] ")


def test_words_to_the_user_are_in_the_same_style(capsys: pytest.CaptureFixture[str]) -> None:
    lines("text")
    logs.say("on")
    assert capsys.readouterr().out == "[mindspeed_tft] on\n"
    lines("json")
    logs.bind(rank=0)
    logs.say("on")
    said = json.loads(capsys.readouterr().out)
    assert (said["message"], said["rank"], said["level"]) == ("on", 0, "INFO")


def test_the_loggers_of_the_program_stay_as_they_are() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    lines("text")
    lines("json")
    assert (list(root.handlers), root.level) == before
    assert len(logging.getLogger(logs.NAME).handlers) == 1, "the last style counts"
    assert not logging.getLogger(logs.NAME).propagate, "nothing is said twice"


def test_the_incident_of_a_rank_is_its_first_stop_since_it_trained() -> None:
    answered = [0]
    stops = logs.Stops(lambda: answered[0])
    assert stops.incident() == 0
    stops.heard(1)
    stops.heard(2)
    assert stops.incident() == 1
    answered[0] = 2
    assert stops.incident() == 0
    stops.heard(3)
    assert stops.incident() == 3
