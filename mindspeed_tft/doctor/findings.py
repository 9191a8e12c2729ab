"""What a check says: green, yellow or red, why, and what to do."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


class Level(enum.IntEnum):
    GREEN = 0  # as it should be
    YELLOW = 1  # a job would start, but something is weaker or slower than it need be, or could not be looked at
    RED = 2  # a job would be refused, or its protection would fail when it is needed


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str  # what was looked at; the same in every version, for programs
    level: Level
    text: str
    remedy: str = ""
    host: str = ""  # on which; "" where it concerns the job as a whole

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "level": self.level.name.lower()}

    @staticmethod
    def from_data(data: dict[str, Any], host: str) -> Finding:
        """What another host said of itself.

        Raises:
            ValueError: it is not a finding.
        """
        try:
            level = Level[str(data["level"]).upper()]
            return Finding(str(data["check"]), level, str(data["text"]), str(data.get("remedy", "")), host)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{data!r} is no finding: {error!r}") from None


def green(check: str, text: str) -> Finding:
    return Finding(check, Level.GREEN, text)


def yellow(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.YELLOW, text, remedy)


def red(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.RED, text, remedy)


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), default=Level.GREEN)
