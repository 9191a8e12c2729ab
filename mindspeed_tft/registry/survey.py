"""What would become of patches that are not active, told from the sources of their hosts: nothing is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from mindspeed_tft.registry.slots import Entry, Row
from mindspeed_tft.registry.sources import Place, Sources
from mindspeed_tft.registry.targets import Target, Unfit
from mindspeed_tft.registry.versions import fits

Version = Callable[[str], str | None]  # of a host package


def survey(entries: Sequence[Entry], sources: Sources, version: Version) -> tuple[Row, ...]:
    """The state of every patch: of an active one as it is, of another one as it would be if it were activated."""
    found = [_survey(entry, sources, version) for entry in entries]
    served = {(entry.group, entry.one_of) for entry, row in zip(entries, found, strict=True) if row.state != "missing"}
    return tuple(
        dataclasses.replace(row, state="skipped")
        if row.state == "missing" and _may_miss(entry, served, version)
        else row
        for entry, row in zip(entries, found, strict=True)
    )


def _may_miss(entry: Entry, served: set[tuple[str, str]], version: Version) -> bool:
    return entry.absence(version) == "skip" or bool(entry.one_of and (entry.group, entry.one_of) in served)


def _survey(entry: Entry, sources: Sources, version: Version) -> Row:
    row = entry.row(version)
    places, reasons = _look(entry, sources, version)
    if entry.active or row.state == "missing":  # missing: found so when the group was to be activated
        taken = next((str(place) for target, place in places if target == entry.target), "")
        return dataclasses.replace(row, place=taken)
    if places:
        target, place = places[0]
        row = row if entry.refused else dataclasses.replace(row, state="declared", detail="")
        return dataclasses.replace(row, target=str(target), place=str(place))
    absent = {target.host for target in entry.targets if not sources.has(target.host)}
    if absent:
        return dataclasses.replace(row, state="declared", detail=f"{' and '.join(sorted(absent))}: not installed")
    return dataclasses.replace(row, state="missing", detail="; ".join(reasons))


def _look(entry: Entry, sources: Sources, version: Version) -> tuple[list[tuple[Target, Place]], list[str]]:
    """The targets that are there, in the order in which they would be taken; of the others, why not."""
    places, reasons = [], []
    for target in entry.targets:
        have = version(target.host)
        try:
            if entry.versions and (have is None or not fits(have, entry.versions)):
                raise Unfit(f"made for {target.host} {entry.versions}, and this is {have or 'of an unknown version'}")
            places.append((target, sources.find(target)))
        except Unfit as unfit:
            reasons.append(f"{target}: {unfit}" if len(entry.targets) > 1 else str(unfit))
    return places, reasons
