"""What kind of fault stands behind the text of an exception: tables of texts per platform, and the user's own. Pure.

A kind says what is broken, never what to do about it. Whatever no table knows is an `exception`: an unknown error is
never taken for one that can be repaired. Texts are compared in whole words (`REDUCE ERROR` also ends in `UCE ERROR`,
and is a bug in a kernel) and without regard to case.

A text alone cannot tell a broken link from a peer that died: both close the connection. Kind `link` says that the
connection failed; whether the peer lives is known to the control plane.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_tft import yaml_files

KINDS: dict[str, str] = {
    "memory": "device memory failed: this rank's tensors may be damaged",
    "memory-low": "device memory failed where no live tensor was: nothing is damaged",
    "corrupted": "device memory failed so early that the last update may have spread the damage to all ranks",
    "link": "a connection to another rank failed; the tensors of this rank are whole",
    "precision": "numbers went wrong without a defect that a device would tell",
    "device": "the device itself is lost: nothing in this process can use it any more",
    "stopped": "this rank was told to stop: no fault of its own",
    "exception": "unknown: never taken for something that can be repaired",
}
PLATFORMS = ("npu", "cuda", "cpu")

# Beside a memory error: the device was asked, and the bad address belongs to no live tensor.
NO_LIVE_TENSOR = "no live tensor was hit"
# How an uncorrectable memory error, and a broken link, read on each platform; fault injection raises these words.
LINK_ERROR = {"npu": "SUSPECT REMOTE ERROR"}  # where the connections of a group are the device's own
MEMORY_ERROR = {"npu": "UCE ERROR", "cuda": "CUDA error: uncorrectable ECC error encountered", "cpu": "UCE ERROR"}


@dataclass(frozen=True)
class Window:
    """When the last optimizer update of this rank began and ended, on the device's clock; 0: not known.

    It begins with the commit: from there on the gradients are final, and other ranks may apply them.
    """

    begin_us: int = 0
    end_us: int = 0


@dataclass(frozen=True)
class Rule:
    """A text that means a kind of fault, on one platform or (None) on each."""

    pattern: re.Pattern[str]
    kind: str
    platform: str | None = None
    dated: bool = False  # the kind holds if the text proves that the error is younger than the last update's begin

    @property
    def name(self) -> str:
        return f"{self.platform or 'any'}: {self.pattern.pattern}"


@dataclass(frozen=True)
class Verdict:
    """The kind of a fault, the rule that says so ("" when none does), and the words for a person."""

    kind: str
    rule: str
    reason: str


class RuleError(ValueError):
    """A file of rules that cannot be used; the message says where and what would be right."""


def classify(text: str, platform: str, extra: Sequence[Rule] = (), window: Window | None = None) -> Verdict:
    """The kind of fault that `text` tells of. The user's `extra` rules are asked first, then the platform's table.

    `window` is needed for memory errors that are reported late: without it they count as `corrupted`.
    """
    for rule in (*extra, *_TABLES.get(platform, ())):
        if rule.platform not in (None, platform):
            continue
        found = rule.pattern.search(text)
        if found is not None:
            return _verdict(rule, found.group(), text, window)
    return Verdict("exception", "", f"no rule of platform {platform} knows this text")


def load_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a YAML file: a list of mappings {pattern, kind, platform}, the platform being optional.

    Raises:
        RuleError: the file cannot be read, or holds something that is no rule.
    """
    try:
        content = yaml_files.load(path)
    except yaml_files.Unreadable as error:
        raise RuleError(f"{path} {error.reason}") from error
    if content is None:
        return ()
    if not isinstance(content, list):
        raise RuleError(f"{path} holds a {type(content).__name__}; write a list of rules: {_EXAMPLE}")
    return tuple(_read_rule(entry, f"{path}, rule {number}") for number, entry in enumerate(content, 1))


# ------------------------------------------------------------------------------------------------ judging


def _verdict(rule: Rule, words: str, text: str, window: Window | None) -> Verdict:
    kind, reason = rule.kind, f"the text says {' '.join(words.split())!r}"
    if rule.dated:
        kind, reason = _dated(kind, reason, text, window)
    if kind in ("memory", "corrupted") and NO_LIVE_TENSOR in text.lower():
        kind, reason = "memory-low", f"{reason}, and that {NO_LIVE_TENSOR}"
    return Verdict(kind, rule.name, f"{reason}: {KINDS[kind]}")


_TIME = re.compile(r"\btime\s+us\s*=\s*(\d+)", re.IGNORECASE)


def _dated(kind: str, reason: str, text: str, window: Window | None) -> tuple[str, str]:
    """Damage that is older than the begin of the last update went into gradients that every rank has applied."""
    found = _TIME.search(text)
    if found is None:
        return "corrupted", f"{reason} without a time"
    if window is None or window.begin_us <= 0:
        return "corrupted", f"{reason} at {found[1]} us, and it is not known when the last update began"
    if int(found[1]) <= window.begin_us:
        return "corrupted", f"{reason} at {found[1]} us, not after the last update began at {window.begin_us} us"
    return kind, f"{reason} at {found[1]} us, after the last update began at {window.begin_us} us"


# ------------------------------------------------------------------------------------------------- tables


def _words(kind: str, *texts: str, dated: bool = False) -> Iterable[Rule]:
    """A rule for each text, in whole words; a space stands for any white space."""
    for text in texts:
        yield _pattern(kind, r"\b" + r"\s+".join(map(re.escape, text.split())) + r"\b", dated)


def _pattern(kind: str, pattern: str, dated: bool = False) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), kind, dated=dated)


# The order decides where a text holds several: damage first, then the word that the rank was only told to stop, since
# a rank that is stopped complains about its links as well.
_NPU = (
    *_words("memory", "UCE ERROR"),
    *_words("memory", "HBM MULTI BIT ECC", dated=True),
    _pattern("memory", r"\berror code(?: is)?\W*507053\b"),
    _pattern("memory", r"\berror code(?: is)?\W*507054\b", dated=True),
    *_words("stopped", "FORCE STOP"),
    *_words("link", "HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "UB LINK ERROR", "HCCS LINK ERROR"),
    *_words("link", "SUSPECT MEM ERROR"),  # of a peer whose memory was read: that one has an error of its own
    # Without the name of a link it must stand alone: "symbolic link error" is the user's.
    _pattern("link", r"(?:^|[:;,\]])\s*LINK\s+ERROR\b"),
    _pattern("link", r"\berror code(?: is)?\W*(?:507904|507055|507056|507057)\b"),
    *_words("precision", "PRECISION ERROR"),
)

_XID = r"\bXid\b(?:\s*\([^)]*\))?\s*:?\s*"
_CUDA = (
    *_words("memory", "uncorrectable ECC error", "cudaErrorECCUncorrectable", "CUDA_ERROR_ECC_UNCORRECTABLE"),
    _pattern("memory", _XID + r"(?:48|94)\b"),  # double-bit ECC; contained memory error
    _pattern("corrupted", _XID + r"95\b"),  # uncontained: not only this process may be hit
    _pattern("device", _XID + r"79\b"),  # fallen off the bus
    *_words("device", "GPU has fallen off the bus"),
    *_words("stopped", "NCCL communicator was aborted"),
    *_words("link", "ncclRemoteError", "IBV_WC_RETRY_EXC_ERR", "remote process exited or there was a network error"),
    _pattern("link", r"\b(?:NCCL|Net)\b[^\n]*\bConnection (?:closed by remote peer|reset by peer)\b"),
    _pattern("link", _XID + r"74\b"),  # NVLink
)

_LOST = r"(?:Connection (?:closed|reset) by peer|Connection refused|Broken pipe|Socket closed)"
_CPU = (
    *_words("memory", MEMORY_ERROR["cpu"]),  # a CPU has none of its own: this is what fault injection raises
    _pattern("stopped", r"^(?:\w+\.)*CommunicationAborted: group \S+: stopped\b"),
    # Both on one line: gloo also reports sizes that do not match, and that is no fault of the link.
    _pattern("link", rf"\bgloo\b[^\n]*\b{_LOST}"),
)

_TABLES: dict[str, tuple[Rule, ...]] = {"npu": _NPU, "cuda": _CUDA, "cpu": _CPU}


# ---------------------------------------------------------------------------------------- the user's rules

_EXAMPLE = "- {pattern: 'LINK DOWN ON PORT \\d+', kind: link, platform: npu}"
_KEYS = ("pattern", "kind", "platform")


def _read_rule(entry: Any, where: str) -> Rule:
    if not isinstance(entry, dict):
        raise RuleError(f"{where} is a {type(entry).__name__}; write {_EXAMPLE}")
    for key in entry:
        _known(str(key), _KEYS, f"{where}: unknown key")
    for key in ("pattern", "kind"):
        if not isinstance(entry.get(key), str):
            raise RuleError(f"{where}: needs a text for {key!r}; write {_EXAMPLE}")
    kind = _known(entry["kind"], KINDS, f"{where}: unknown kind")
    platform = entry.get("platform")
    if platform is not None:
        platform = _known(str(platform), PLATFORMS, f"{where}: unknown platform")
    return Rule(_compiled(entry["pattern"], where), kind, platform)


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        raise RuleError(f"{where}: {yaml_files.shown(pattern)} is no regular expression: {error}") from error
    if compiled.search("") is not None:
        raise RuleError(f"{where}: {yaml_files.shown(pattern)} fits every text; name the words of the fault")
    return compiled


def _known(word: str, known: Iterable[str], what: str) -> str:
    names = list(known)
    if word in names:
        return word
    nearest = difflib.get_close_matches(word[:100], names, n=1, cutoff=0.0)[0]
    raise RuleError(f"{what} {yaml_files.shown(word)}; the nearest is {nearest!r} of {', '.join(names)}")
