"""Names of the patch groups (which patches go on together), and the Megatron versions that they hold for."""

from __future__ import annotations

from typing import TypedDict

from mindspeed_tft.registry import REGISTRY, Missing, version_of

PARSER = "parser"  # always: Megatron's argument parser and validation
HIGH_AVAILABILITY = "high-availability"  # --enable-high-availability
INSTANCES = "instances"  # several instances of the optimizer, where a release of Megatron gets their norm wrong
DRILL = "drill"  # only in a process that a drill told to break itself
MASTER = "--enable-high-availability"

# Proved on these; another Megatron is refused at start-up with its version. Widen only together with the drills
# (tests/megatron/test_checkouts.py). What a release has elsewhere, or lacks, is in `megatron_releases`.
MEGATRON = ">=0.12.1,<0.20,!=0.13.*,!=0.14.*,!=0.15.*,!=0.16.*"
RELEASES = "0.12 from 0.12.1 on, 0.17 to 0.19"  # the same, for people

REGISTRY.host("torch", version_of("torch", file="version.py", distribution="torch"))
REGISTRY.host("megatron", version_of("megatron", file="core/package_info.py", distribution="megatron-core"))


class Declaration(TypedDict):
    """What all patches of a feature have in common."""

    group: str
    needs: str
    versions: str


class SomeReleases(Declaration):
    """What only some of the supported releases need."""

    elsewhere: Missing


HA = Declaration(group=HIGH_AVAILABILITY, needs=MASTER, versions=MEGATRON)
