"""Checkouts of Megatron-LM that a test needs, named by the environment; without them the test is skipped, saying so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindspeed_tft.registry.versions import fits, version_in

MEGATRON = "TFT_MEGATRON_PATH"


def release(checkout: Path) -> str:
    """The Megatron release of a checkout, or of a folder that a wheel was unpacked to."""
    version = version_in(checkout / "megatron" / "core" / "package_info.py")
    assert version is not None, f"{checkout} does not tell which Megatron it holds"
    return version


def megatron(versions: str) -> Path:
    """The checkout that `TFT_MEGATRON_PATH` names, if its release is one of `versions`; else the test is skipped."""
    named = os.environ.get(MEGATRON)
    if not named:
        pytest.skip(f"{MEGATRON} names no checkout of Megatron-LM ({versions} is wanted)")
    checkout = Path(named).resolve()
    assert (checkout / "megatron" / "core").is_dir(), f"{MEGATRON}={named} holds no megatron/core"
    found = release(checkout)
    if not fits(found, versions):
        pytest.skip(f"{MEGATRON} names Megatron {found}, and this is for {versions}")
    return checkout
