"""One thing that is done in several ways: the way of the version that is there is taken, and none is guessed."""

from __future__ import annotations

import pytest

from mindspeed_tft.patches import (  # noqa: F401  (importing declares)
    high_availability,
    megatron_releases,
    megatron_torch_dist,
    megatron_unproved_releases,
)
from mindspeed_tft.patches.groups import MEGATRON
from mindspeed_tft.registry import PatchError, Registry, Variants
from mindspeed_tft.registry.versions import fits

RELEASES = ("0.12.1", "0.12.3", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2")
OTHERS = ("0.12.0", "0.13.0", "0.14.1", "0.15.3", "0.16.1", "0.20.0")


def _variants(version: str | None) -> Variants:
    registry = Registry()
    registry.host("tiny", lambda: version)
    found = Variants("count to two", "tiny", registry)
    found.on(">=2")(lambda: "new")
    found.on("<2")(lambda: "old")
    return found


def test_the_function_of_the_version_that_is_there_is_called() -> None:
    assert (_variants("2.0")(), _variants("1.9.9")()) == ("new", "old")
    assert _variants("1").ranges() == (">=2", "<2")


def test_a_function_that_is_declared_later_is_found_too() -> None:
    found = _variants("2.0")
    assert found() == "new"
    other = Variants("count to three", "tiny", found._registry)
    with pytest.raises(PatchError, match=r"count to three: .* tiny 2.0 is not declared \(declared: none\)"):
        other()
    other.on("==2.*")(lambda: "three")
    assert other() == "three"


def test_a_version_without_a_function_is_an_error_that_names_it() -> None:
    found = _variants(None)
    with pytest.raises(PatchError, match=r"count to two: .* \(version unknown\) .* \(declared: >=2; <2\).*Remedy"):
        found()


def test_a_range_that_cannot_be_read_is_an_error_where_it_is_declared() -> None:
    with pytest.raises(ValueError, match="no version clause"):
        _variants("1").on("=>2")


def test_supported_releases() -> None:
    assert all(fits(release, MEGATRON) for release in RELEASES)
    assert not any(fits(release, MEGATRON) for release in OTHERS)


@pytest.mark.parametrize(
    "name", [name for name, value in vars(megatron_releases).items() if isinstance(value, Variants)]
)
def test_each_supported_release_has_one_way(name: str) -> None:
    ranges = getattr(megatron_releases, name).ranges()
    for release in RELEASES:
        assert len([each for each in ranges if fits(release, each)]) == 1, (release, ranges)


class _Space:
    """Arguments of a Megatron that has one of the options only."""

    def __init__(self, **values: object) -> None:
        vars(self).update(values)


def test_what_is_refused_depends_on_the_release() -> None:
    experts = _Space(num_experts=4)
    refused = megatron_unproved_releases.first(experts, "0.12.1")
    assert refused is not None and refused.flag == "--num-experts" and refused.remedy
    assert megatron_unproved_releases.first(experts, "0.17.1") is None
    assert megatron_unproved_releases.first(_Space(num_experts=None), "0.12.1") is None
    background = _Space(async_save=True)
    assert megatron_unproved_releases.first(background, "0.12.1") is not None
    assert megatron_unproved_releases.first(background, "0.19.2") is None
