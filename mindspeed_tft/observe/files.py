"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def page_of(incident: Path) -> Path:
    """Where the page of an incident file is."""
    return incident.with_suffix(".html")


def stacks_name(rank: int, pid: int) -> str:
    """The file in the directory of incidents that has the stacks of a process which did not move."""
    return f"stacks-rank{rank}-pid{pid}.txt"


def where(incident: Path) -> str:
    """The words that name an incident file and its page to the user."""
    return f"incident: {incident}  page: {page_of(incident)}"


def write_atomic(path: Path, text: str) -> None:
    """The whole file or none of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
