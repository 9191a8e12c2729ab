"""What a Kubernetes job file turns on, for `tftctl config --from-job`: labels, annotations, environment and ports that
ClusterD's operator reads, what it will put into the pods because of them, and what cannot be.

Knows the words of a platform, and nothing of what our settings do with them: that is `config`'s affair.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_tft import yaml_files
from mindspeed_tft.settings import Refused

STRATEGIES = ("retry", "recover", "recover-in-place", "elastic-training", "dump", "exit")
TASKD_PORT = 9601
# What the operator puts into HIGH_AVAILABILITY (PyTorch), and into MS_ENABLE_TFT (MindSpore).
_FOR_PYTORCH = {"recover-in-place": "recover", "exit": "recover"}
_FOR_MINDSPORE = {
    **dict.fromkeys(("dump", "exit"), ("TTP",)),
    "retry": ("UCE", "HCCE"),
    **dict.fromkeys(("recover", "recover-in-place"), ("ARF",)),
}
_TFT_KEYS = ("TTP", "UCE", "HCCE", "ARF", "TRE", "TSP", "RSC")
_NOT_BUILT = {
    "elastic-training": "training does not go on with fewer nodes in this version",
    "hotSwitch": "a rank does not move to another node while it trains; ClusterD's hot-switch is refused",
}


@dataclass(frozen=True)
class Item:
    """One thing that the file says, or that the operator will add because of it."""

    where: str  # "label", "annotation", "environment", "port", "operator"
    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class JobFile:
    """All that was found."""

    framework: str = ""  # "pytorch", "mindspore"
    items: tuple[Item, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)  # of a pod, as far as the file tells
    words: tuple[str, ...] = ()  # of its commands, flags of the training among them
    refusals: tuple[Refused, ...] = ()


def _one_of(*allowed: str) -> Callable[[str], str]:
    return lambda value: "" if value in allowed else f"use one of {', '.join(allowed)}"


def _between(low: int, high: int) -> Callable[[str], str]:
    def check(value: str) -> str:
        right = value.isascii() and value.isdigit() and len(value) < 10 and low <= int(value) <= high
        return "" if right else f"use a number from {low} to {high}"

    return check


def _words_of(*allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        words = [word.strip() for word in value.split(",")]
        return "" if all(word in allowed for word in words) else f"use a comma list of {', '.join(allowed)}"

    return check


def _switches(value: str) -> str:
    """'{TTP:1,TSP:1}', with or without blanks and quotes."""
    inside = value.strip().removeprefix("{").removesuffix("}")
    pairs = [pair.partition(":") for pair in inside.split(",") if pair.strip()]
    right = all(key.strip(" '\"") in _TFT_KEYS and number.strip().isdigit() for key, _, number in pairs)
    braces = value.strip().startswith("{") and value.strip().endswith("}")
    return "" if right and braces else f"write it as '{{TTP:1,TSP:1}}', of {', '.join(_TFT_KEYS)}"


@dataclass(frozen=True)
class _Rule:
    where: str
    name: str
    remedy: Callable[[str], str]  # of a value: how to write it; "" where it is right
    meaning: str


_SWITCH = _one_of("on", "off")
_RULES = {
    (rule.where, rule.name): rule
    for rule in (
        _Rule("label", "fault-scheduling", _one_of("grace", "force", "off"), "pods are replaced after a fault"),
        _Rule("label", "pod-rescheduling", _SWITCH, "only the pod with the fault is replaced, all launchers restart"),
        _Rule("label", "process-recover-enable", _one_of("on", "pause", "off"), "ClusterD decides how a fault is"
              " answered; set by its operator where recover-strategy is given"),
        _Rule("label", "subHealthyStrategy", _one_of("ignore", "graceExit", "forceExit", "hotSwitch"),
              "what a degraded device leads to"),
        _Rule("label", "fault-retry-times", _between(1, 1000), "restarts of the job without a known cause"),
        _Rule("label", "framework", _one_of("pytorch", "mindspore", "tensorflow"), "what the operator prepares"),
        _Rule("annotation", "recover-strategy", _words_of(*STRATEGIES), "strategies among which ClusterD chooses"),
        _Rule("annotation", "wait-reschedule-timeout", _between(30, 270), "seconds that ClusterD waits for new pods"),
        _Rule("environment", "PROCESS_RECOVER", _SWITCH, "ClusterD is asked"),
        _Rule("environment", "ELASTIC_PROCESS_RECOVER_ENABLE", _one_of("0", "1"), "the older name of that switch"),
        _Rule("environment", "ENABLE_RESTART_FAULT_PROCESS", _SWITCH, "processes are started again in their pods;"
              " tftrun does so anyway"),
        _Rule("environment", "TASKD_PROCESS_ENABLE", _SWITCH, "TaskD runs the job, and is ClusterD's client; off with"
              " this plugin"),
        _Rule("environment", "LOCAL_PROXY_ENABLE", _SWITCH, "ClusterD is reached through a proxy beside the job"),
        _Rule("environment", "MINDIO_WAIT_MINDX_TIME", _between(1, 3600), "seconds that ClusterD may take to decide"),
        _Rule("environment", "TTP_PORT", _between(1, 65535), "port of MindIO's controller; not read by this plugin"),
        _Rule("environment", "HCCL_ASYNC_ERROR_HANDLING", _one_of("0", "1", "2"), "HCCL's own watchdog; 0: off"),
        _Rule("environment", "HIGH_AVAILABILITY", _words_of("dump", "retry", "recover", "elastic-training"),
              "what this plugin may do"),
        _Rule("environment", "MS_ENABLE_TFT", _switches, "what MindSpore may do"),
    )
}  # fmt: skip
_OURS = frozenset(name for where, name in _RULES if where != "environment") - {"framework"}


def read(path: Path) -> JobFile:
    """What a job file says.

    Raises:
        Refused: it cannot be read, or holds no job.
    """
    try:
        found = [document for document in yaml_files.load_all(path) if document]
    except yaml_files.Unreadable as error:
        raise Refused("--from-job", f"{path} {error.reason}", error.remedy) from None
    try:
        jobs = [each for each in found if isinstance(each, dict) and _templates(each)]
        if len(jobs) == 1:
            return _of_job(jobs[0])
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # the schema is Kubernetes' affair
        what = f"{type(error).__name__}: {error}"
        raise Refused("--from-job", f"{path} is no job as Kubernetes knows one ({what})", "correct the file") from None
    raise Refused("--from-job", f"{path} holds {len(jobs)} jobs", "give a file with one (AscendJob, Job, Volcano)")


def _templates(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pods of an AscendJob, a Job or a Volcano job."""
    spec = job.get("spec") or {}
    if not isinstance(spec, dict):
        return []  # of another kind
    owners = [spec, *(spec.get("tasks") or ()), *(spec.get("replicaSpecs") or {}).values()]
    return [owner["template"] for owner in owners if isinstance(owner, dict) and "template" in owner]


def _of_job(job: Mapping[str, Any]) -> JobFile:
    metadata, templates = job.get("metadata") or {}, _templates(job)
    items: list[Item] = []
    refusals: list[Refused] = []
    labels, annotations = _texts(metadata.get("labels")), _texts(metadata.get("annotations"))
    environ, words, ports = _of_pods(templates)
    for where, values in (("label", labels), ("annotation", annotations), ("environment", environ)):
        for name, value in sorted(values.items()):
            rule = _RULES.get((where, name))
            if rule is None:
                refusals += _misplaced(where, name)
                continue
            items.append(Item(where, name, value, rule.meaning))
            if remedy := rule.remedy(value):
                refusals.append(Refused(f"{where} {name}", f"{yaml_files.shown(value)} means nothing", remedy))
    items += [Item("port", name, str(port), _port(name)) for name, port in sorted(ports.items())]
    framework = labels.get(
        "framework", "mindspore" if "Scheduler" in str((job.get("spec") or {}).keys()) else "pytorch"
    )
    strategies = tuple(word.strip() for word in annotations.get("recover-strategy", "").split(",") if word.strip())
    known = tuple(word for word in strategies if word in STRATEGIES)
    added = _added(framework, known) if job.get("kind") == "AscendJob" else {}
    more = {name: value for name, value in added.items() if name not in environ}
    items += [Item("operator", name, value, "put into every pod") for name, value in more.items()]
    refusals += _together(job, labels, known, {**added, **environ}, ports)
    return JobFile(framework, tuple(items), {**added, **environ}, words, tuple(refusals))


def _texts(values: Mapping[str, Any] | None) -> dict[str, str]:
    """YAML reads on and off as truth values, and numbers as numbers."""
    plain = {True: "on", False: "off"}
    return {
        str(name): plain[value] if isinstance(value, bool) else str(value) for name, value in (values or {}).items()
    }


def _of_pods(templates: list[Mapping[str, Any]]) -> tuple[dict[str, str], tuple[str, ...], dict[str, int]]:
    """Environment, words of the commands and named ports of all pods."""
    environ: dict[str, Any] = {}
    words: list[str] = []
    ports: dict[str, int] = {}
    for template in templates:
        for container in (template.get("spec") or {}).get("containers") or ():
            given = container.get("env") or ()
            environ |= {each["name"]: each["value"] for each in given if "value" in each}
            for text in (*(container.get("command") or ()), *(container.get("args") or ())):
                environ |= dict(re.findall(r"^\s*export (\w+)=[\"']?([^\"'\n$]*?)[\"']?\s*$", str(text), re.MULTILINE))
                words += _split(str(text))
            ports |= {str(each.get("name", "")): each["containerPort"] for each in container.get("ports") or ()}
    return _texts(environ), tuple(dict.fromkeys(words)) if len(templates) > 1 else tuple(words), ports


def _split(text: str) -> list[str]:
    try:
        return [word for word in shlex.split(text, comments=True) if word != "--"]
    except ValueError:  # no words of a shell
        return []


def _misplaced(where: str, name: str) -> Iterator[Refused]:
    """A word of the platform at a place where nobody reads it, or nearly one."""
    right = next((each for each, other in _RULES if other == name), "")
    if right and where != "environment":
        yield Refused(f"{where} {name}", f"it is read as {right} only", f"move it to the {right}s")
        return
    near = {each.replace("-", "").lower(): each for each in _OURS}.get(name.replace("-", "").replace("_", "").lower())
    if near:
        yield Refused(f"{where} {name}", "nobody reads it", f"did you mean {near}")


def _port(name: str) -> str:
    meanings = {"taskd-port": "TaskD's manager", "ttp-port": "MindIO's controller", "ascendjob-port": "rendezvous"}
    return meanings.get(name, "")


def _added(framework: str, strategies: tuple[str, ...]) -> dict[str, str]:
    """What the operator puts into a pod."""
    if not strategies:
        return {}
    found = {"PROCESS_RECOVER": "on", "MINDX_TASK_ID": "(the id of the job)", "MINDX_SERVER_IP": "MINDX_SERVER_IP"}
    if strategies != ("elastic-training",):
        found["ELASTIC_PROCESS_RECOVER_ENABLE"] = "1"
    if "recover-in-place" in strategies:
        found["ENABLE_RESTART_FAULT_PROCESS"] = "on"
    if framework == "mindspore":
        keys = dict.fromkeys(key for word in strategies for key in _FOR_MINDSPORE.get(word, ()))
        found["MS_ENABLE_TFT"] = "{" + ",".join(f"{key}:1" for key in keys) + "}"
        found["MINDIO_FOR_MINDSPORE"] = "1"
    else:
        found["HIGH_AVAILABILITY"] = ",".join(dict.fromkeys(_FOR_PYTORCH.get(word, word) for word in strategies))
        found["HCCL_ASYNC_ERROR_HANDLING"] = "0"
    return found


def _together(
    job: Mapping[str, Any],
    labels: Mapping[str, str],
    strategies: tuple[str, ...],
    environ: Mapping[str, str],
    ports: Mapping[str, int],
) -> Iterator[Refused]:
    """What does not go together, or is not in this version."""
    for word in (*strategies, labels.get("subHealthyStrategy", "")):
        if word in _NOT_BUILT:
            place = "label subHealthyStrategy" if word == "hotSwitch" else "annotation recover-strategy"
            yield Refused(place, f"{word}: {_NOT_BUILT[word]}", f"leave {word} out")
    if not strategies:
        return
    if labels.get("process-recover-enable") == "off" or environ.get("PROCESS_RECOVER") == "off":
        yield Refused("annotation recover-strategy", "process recovery is switched off beside it",
                      "set process-recover-enable and PROCESS_RECOVER to on, or leave the strategies out")  # fmt: skip
    if labels.get("fault-scheduling", "off") == "off":
        yield Refused("label fault-scheduling", "no pod is replaced, so that nothing but retry and dump can be done",
                      "set it to force or grace")  # fmt: skip
    if "fault-retry-times" not in labels:
        yield Refused("label fault-retry-times", "process recovery needs it", "set it to a number, say 3")
    for template in _templates(job):
        if (policy := (template.get("spec") or {}).get("restartPolicy")) not in (None, "Never"):
            yield Refused("restartPolicy", f"{policy}: a pod would come back beside its replacement", "set it to Never")
    if ports.get("taskd-port", TASKD_PORT) != TASKD_PORT:
        given = yaml_files.shown(ports["taskd-port"])
        yield Refused("port taskd-port", f"{given} is not where others look", f"set it to {TASKD_PORT}")
