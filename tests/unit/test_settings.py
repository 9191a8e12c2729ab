"""Settings: precedence, refusals that name flag, reason and remedy, and the order of all timeouts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tft import arguments, settings
from mindspeed_tft.settings import Refused


def resolve(words: list[str], environ: dict[str, str] | None = None) -> tuple[settings.Settings, dict[str, str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_flags(parser)
    return arguments.resolve(parser.parse_args(words), environ or {})


def test_everything_is_off_by_default() -> None:
    found, origin = resolve([])
    assert not found.enable_high_availability
    assert set(origin.values()) == {"default"}


def test_environment_beats_flag_beats_yaml_beats_default(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("enable-high-availability: true\noptimizer-replica-num: 4\ntft-deadline: 50\n")
    found, origin = resolve(
        ["--tft-config", str(preset), "--optimizer-replica-num", "3"], {"HIGH_AVAILABILITY": "dump", "TTP_OT": "20"}
    )
    assert (found.enable_high_availability, origin["enable_high_availability"]) == (True, "environment")
    assert (found.optimizer_replica_num, origin["optimizer_replica_num"]) == (3, "flag")
    assert (found.tft_deadline, origin["tft_deadline"]) == (50.0, f"--tft-config {preset}")
    assert (found.tft_platform, origin["tft_platform"]) == ("auto", "default")
    assert found.deadlines().dump == 20.0


@pytest.mark.parametrize("name", ["dump", "cpu-demo"])
def test_presets_load(name: str) -> None:
    found, _ = resolve(["--tft-config", name])
    assert found.enable_high_availability


def test_high_availability_words_are_stripped_and_imply_the_dump() -> None:
    found, _ = resolve([], {"HIGH_AVAILABILITY": " retry , dump "})
    assert found.enable_high_availability and found.enable_hbmfault_repair


@pytest.mark.parametrize(
    ("words", "environ", "flag", "remedy"),
    [
        (["--enable-hbmfault-repair"], {}, "--enable-hbmfault-repair", "--enable-high-availability"),
        (["--enable-worker-reboot"], {}, "--enable-worker-reboot", "--enable-high-availability"),
        (["--enable-elastic-training"], {}, "--enable-elastic-training", "--enable-high-availability"),
        ([], {"HIGH_AVAILABILITY": "dump,retri"}, "HIGH_AVAILABILITY", "dump, retry and recover"),
        ([], {"TTP_OT": "soon"}, "TTP_OT", "seconds"),
        (["--optimizer-replica-num", "1"], {}, "--optimizer-replica-num", "--help"),
        (["--tft-deadline", "3"], {}, "--tft-deadline", "--help"),
        (["--tft-deadline", "0"], {}, "--tft-deadline", "--help"),
        (["--optimizer-replica-num", "0"], {}, "--optimizer-replica-num", "--help"),
        (["--tft-controller-port", "0"], {}, "--tft-controller-port", "--help"),
        (["--tft-config", "no-such-preset"], {}, "--tft-config", "cpu-demo"),
    ],
)
def test_refusals_name_flag_and_remedy(words: list[str], environ: dict[str, str], flag: str, remedy: str) -> None:
    with pytest.raises(Refused) as caught:
        resolve(words, environ)
    message = str(caught.value)
    assert message.startswith(flag) and "Remedy" in message and remedy in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer-replicas-num: 2", "optimizer-replica-num"),
        ("- a list", "mapping"),
        ("a: [1", "YAML"),
        ("optimizer-replica-num: two", "--optimizer-replica-num"),
    ],
)
def test_bad_yaml_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(Refused, match=expected):
        resolve(["--tft-config", str(path)])


def test_a_dump_that_does_not_fit_into_the_deadline_is_refused() -> None:
    with pytest.raises(Refused, match="--tft-deadline to at least"):
        resolve(["--tft-deadline", "30"], {"TTP_OT": "30"})[0].deadlines()


@given(st.floats(min_value=10, max_value=86400))
def test_all_timeouts_follow_from_one_knob_in_order(total: float) -> None:
    found = settings.Settings(tft_deadline=total).deadlines()
    assert 0 < found.heartbeat < found.heartbeat_lost < found.stop < total
    assert found.stop + found.dump + found.exit == pytest.approx(total)


def test_a_launcher_that_kills_earlier_shortens_every_deadline() -> None:
    found = settings.Settings().deadlines(patience=30)
    assert found.stop + found.dump + found.exit == pytest.approx(27)
    assert 2 * found.order <= found.dump  # a second attempt fits
    assert settings.Settings(tft_deadline=20).deadlines(patience=30) == settings.Settings(tft_deadline=20).deadlines()


def test_flags_are_added_only_if_absent() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable-high-availability", action="store_true", help="somebody else's")
    arguments.add_flags(parser)
    assert parser.parse_args(["--enable-high-availability"]).enable_high_availability is True


@pytest.mark.parametrize(
    ("words", "hang", "fixed"),
    [
        ([], settings.HANG_DUMPED, False),
        (["--enable-worker-reboot"], settings.HANG_RESTARTED, False),
        (["--tft-hang-seconds", "7.5"], 7.5, True),
        (["--tft-hang-seconds", "-1"], 0.0, False),
    ],
)
def test_how_long_a_rank_may_stand_still(words: list[str], hang: float, fixed: bool) -> None:
    found, _ = resolve(["--enable-high-availability", *words])
    deadlines = found.deadlines()
    assert (deadlines.hang, deadlines.hang_fixed) == (hang, fixed)


def test_a_hang_cannot_be_found_faster_than_ranks_are_heard() -> None:
    found, _ = resolve(["--enable-high-availability", "--tft-hang-seconds", "1"])
    with pytest.raises(Refused, match=r"--tft-hang-seconds.*two heartbeats.*set it to at least 2"):
        found.deadlines()
