"""Names of the patch groups: which patches go on together."""

from __future__ import annotations

PARSER = "parser"  # always: Megatron's argument parser and validation
HIGH_AVAILABILITY = "high-availability"  # --enable-high-availability
DRILL = "drill"  # only in a process that a drill told to break itself
MASTER = "--enable-high-availability"
