"""Names of the patch groups (which patches go on together), and the Megatron versions that they hold for."""

from __future__ import annotations

from typing import TypedDict

from mindspeed_tft.registry import REGISTRY, Missing, version_of
from mindspeed_tft.registry.versions import fits

PARSER = "parser"  # always: Megatron's argument parser and validation
HIGH_AVAILABILITY = "high-availability"  # --enable-high-availability
MENDED = "mended"  # what releases of Megatron get wrong: no part of fault tolerance, but nothing is exact without
DRILL = "drill"  # only in a process that a drill told to break itself
MASTER = "--enable-high-availability"

# Proved on these; another Megatron is refused at start-up with its version. Widen only together with the drills
# (tests/megatron/test_checkouts.py). What a release has elsewhere, or lacks, is in `megatron_releases`.
MEGATRON = ">=0.12.1,<0.20,!=0.13.*,!=0.14.*,!=0.15.*,!=0.16.*"
RELEASES = "core_r0.6.0, 0.12 from 0.12.1 on, 0.17 to 0.19"  # SUPPORTED, for people

MEGATRON_06 = ">=0.6,<0.7"  # core_r0.6.0: modules named megatron_06_*
SUPPORTED = (MEGATRON_06, MEGATRON)

REGISTRY.host("torch", version_of("torch", file="version.py", distribution="torch"))
REGISTRY.host("megatron", version_of("megatron", file="core/package_info.py", distribution="megatron-core"))


class Declaration(TypedDict):
    """What all patches of a feature have in common."""

    group: str
    needs: str
    versions: str
    elsewhere: Missing


class SomeReleases(Declaration):
    """What only some of the supported releases need."""


HA = Declaration(group=HIGH_AVAILABILITY, needs=MASTER, versions=MEGATRON, elsewhere="skip")
HA_06 = Declaration(group=HIGH_AVAILABILITY, needs=MASTER, versions=MEGATRON_06, elsewhere="skip")
# What is the same in all of them.
HA_ALL = Declaration(group=HIGH_AVAILABILITY, needs=MASTER, versions=">=0.6,<0.20", elsewhere="error")
DRILL_NEW = Declaration(group=DRILL, needs="", versions=MEGATRON, elsewhere="skip")
DRILL_06 = Declaration(group=DRILL, needs="", versions=MEGATRON_06, elsewhere="skip")


def supported(version: str) -> bool:
    """Whether high availability is proved on this version of Megatron."""
    return any(fits(version, versions) for versions in SUPPORTED)


def is_06() -> bool:
    """Whether the Megatron of this process is core_r0.6.0."""
    version = REGISTRY.version("megatron")
    return version is not None and fits(version, MEGATRON_06)
