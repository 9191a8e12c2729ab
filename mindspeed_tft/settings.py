"""The validated settings of one job: one frozen object, built once at start-up.

Values come from the environment, Megatron's command line, a YAML preset and the defaults below, in that order of
precedence; `arguments` collects them. What cannot work is refused here or there with a message that names the flag,
the reason and the remedy. This module knows neither Megatron nor torch.

The description of each field is the one line that `--help`, `tftctl config`, the JSON schema and docs/flags.md show.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from mindspeed_tft import yaml_files
from mindspeed_tft.engine.types import Deadlines

STRATEGIES = {"dump": "enable_high_availability", "retry": "enable_hbmfault_repair",
              "recover": "enable_worker_reboot", "elastic-training": "enable_elastic_training"}  # fmt: skip
# Fields without a flag, and the variable that sets them.
VARIABLES = {"tft_dump_seconds": "TTP_OT", "tft_controller_address": "TTP_ADDR"}

# What ClusterD's operator puts into every job. It is weaker than what the user says.
PLATFORM = "PROCESS_RECOVER=on with MINDX_TASK_ID and MINDX_SERVER_IP"
CLUSTERD_PORT = 8899
NOBODY = "none"  # of --tft-clusterd

LONGEST = 86400.0  # seconds that any setting may ask for: a day
STOP_AT_MOST = 30.0  # seconds, however long the deadline is
EXIT_AT_MOST = 15.0
HANG_RESTARTED = 5.0  # seconds without progress, at least, until a rank is ended that can be started again alone
HANG_DUMPED = 30.0  # the same where the end of a rank is the end of the job: a storage hiccup must not be
LAUNCHER_MARGIN = 3.0  # seconds between our last deadline and a launcher's SIGKILL
LONGEST_NAME = 100  # characters of a name that is compared with ours
SHORTEST = 10.0  # seconds of a deadline
_EMPTY = "it is empty"
_NO_EMPTY = "give a value, or leave it out (was a variable of the shell not set?)"
# How torchrun is made to wait longer. Its --shutdown-timeout alone counts for signals only, not for failed workers.
TORCHRUN_WAITS = (
    "start with tftrun, which waits as long as --tft-deadline asks for; or give --logs-specs mindspeed_tft to torchrun,"
    " and set its --shutdown-timeout to at least {seconds}"
)


class Refused(ValueError):
    """A setting that cannot work. The message names the flag, the reason and the remedy."""

    def __init__(self, flag: str, reason: str, remedy: str) -> None:
        super().__init__(f"{flag}: {reason}. Remedy: {remedy}.")
        self.flag, self.reason, self.remedy = flag, reason, remedy


class Settings(BaseModel):
    """Everything that the user may set. Field names are the flags with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enable_high_availability: bool = Field(
        default=False,
        description="master switch: on a fault the surviving ranks save the last completed step as an ordinary"
        " checkpoint",
    )
    enable_hbmfault_repair: bool = Field(
        default=False,
        description="repair a device-memory or link fault online, no process restarts (needs"
        " --enable-high-availability)",
    )
    enable_worker_reboot: bool = Field(
        default=False, description="restart only the process that died (needs --enable-high-availability)"
    )
    enable_elastic_training: bool = Field(
        default=False,
        description="go on with fewer data-parallel ranks when there is no spare (needs --enable-high-availability)",
    )
    distributed_optimizer_no_replica: bool = Field(
        default=False,
        description="keep no replica: recoveries read the missing shard from the last periodic checkpoint",
    )
    optimizer_replica_num: int = Field(
        default=2, ge=2, description="data-parallel ranks that hold each optimizer shard (default 2)"
    )
    tft_require_separate_hosts: bool = Field(
        default=False,
        description="refuse to start where one host holds all replicas of a shard (default: warn)",
    )
    tft_platform: Literal["auto", "cpu", "cuda", "npu"] = Field(
        default="auto", description="device to train on (default: what the machine has)"
    )
    tft_deadline: float = Field(
        default=120.0,
        ge=SHORTEST,
        le=LONGEST,
        description="from a fault to the end of the job (twice that if a repair fails first); all timeouts follow"
        " (default 120)",
    )
    tft_reboot_wait: float = Field(
        default=60.0,
        gt=0,
        le=LONGEST,
        description="how long a process that was started again may take until it can join (default 60)",
    )
    tft_hang_seconds: float = Field(
        default=0.0,
        ge=-LONGEST,
        le=LONGEST,
        description="no progress for so long is a hang of the rank that others wait for: its stacks are kept, its"
        " process is killed (default 0: by the step time; -1: no watch)",
    )
    tft_warm_standby: bool = Field(
        default=True,
        description="with worker reboot: keep a process per node that has imported everything (some 300 MB; default"
        " on)",
    )
    tft_shard_hash: Literal["auto", "step", "stop", "never"] = Field(
        default="auto",
        description="hash each optimizer shard after a step, beside the next one, so that a bit that flips later is"
        " noticed: after every one (step), or after as many as half a percent of the time allows (auto); stop: only"
        " when training stops, to compare holders; never (default auto)",
    )
    tft_dump_seconds: float | None = Field(
        default=None, gt=0, le=LONGEST, description="seconds that a dump may take (default: what the deadline leaves)"
    )
    tft_controller_address: str | None = Field(
        default=None, description="host of the controller (default: torchrun's MASTER_ADDR)"
    )
    tft_controller_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="TCP port of the controller; needed for more than one host, otherwise no port is opened",
    )
    tft_tls_dir: str | None = Field(
        default=None,
        description="ca.crt, node.crt and node.key for mutual TLS between hosts, or a directory that has one with these"
        " for each host, under its name",
    )
    tft_tls_key_password_file: str | None = Field(
        default=None, description="file with the password of an encrypted node.key"
    )
    tft_tls_decrypt: str | None = Field(
        default=None,
        description="module:function that gets the bytes of node.key and returns the key as PEM, for keys that a key"
        " service opens",
    )
    tft_insecure: bool = Field(default=False, description="allow an unencrypted controller port (logged loudly)")
    tft_incident_dir: str | None = Field(
        default=None, description="where incident reports go (default: SAVE/tft_incidents)"
    )
    tft_log_format: Literal["text", "json"] = Field(
        default="text",
        description="of what the plugin logs: readable lines, or JSON lines for a collector (default text)",
    )
    tft_metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="port at which the leading controller serves metrics for Prometheus (default: none)",
    )
    tft_metrics_host: str = Field(
        default="127.0.0.1",
        description="address of that port, on every controller's host; not loopback: with client certificates of"
        " --tft-tls-dir, or --tft-insecure (default 127.0.0.1)",
    )
    tft_otel_endpoint: str | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector (OTLP over gRPC), which gets a trace of each incident (needs pip"
        " install mindspeed_tft[otel])",
    )
    tft_clusterd: str | None = Field(
        default=None,
        description="URL of the cluster manager ClusterD, which then decides how faults are answered; https:// with"
        " the files of --tft-tls-dir; none: nobody is asked (default: what its operator set in the job)",
    )
    tft_clusterd_job: str | None = Field(
        default=None, description="id by which ClusterD knows this job (default: MINDX_TASK_ID)"
    )
    tft_clusterd_wait: float = Field(
        default=60.0,
        gt=0,
        le=3600.0,
        description="seconds that ClusterD may take for a decision, from the stop of all ranks on; then our own rules"
        " hold (default 60)",
    )
    tft_fault_rules: str | None = Field(
        default=None, description="YAML list of {pattern, kind, platform}: more error texts"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        """A variable of the shell that is not set gives an empty text, which is never what was meant."""
        if isinstance(value, str) and not value.strip():
            raise ValueError(_EMPTY)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads yes, no, on and off as truth values, which pydantic would count as 1 and 0."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("it is a truth value, and something else is wanted")
        return value

    @property
    def clusterd(self) -> str:
        """URL of the cluster manager that decides; "": nobody is asked."""
        return "" if self.tft_clusterd in (None, "", NOBODY) else str(self.tft_clusterd)

    @property
    def replicas(self) -> int:
        return 1 if self.distributed_optimizer_no_replica else self.optimizer_replica_num

    def strategies(self) -> tuple[str, ...]:
        """What the engine may decide for, the weakest last."""
        wanted = {"retry": self.enable_hbmfault_repair, "recover": self.enable_worker_reboot}
        return (*(name for name, on in wanted.items() if on), "dump")

    def deadline(self, patience: float | None = None) -> float:
        """Seconds from a fault to the end of the job, which all timeouts are shares of.

        Args:
            patience: seconds that the launcher lets survivors live; where it is shorter than the knob, it counts.
        """
        if patience is None:
            return self.tft_deadline
        return min(self.tft_deadline, max(SHORTEST, patience - LAUNCHER_MARGIN))

    def deadlines(
        self,
        patience: float | None = None,
        origin: Mapping[str, str] | None = None,
        waits: str = TORCHRUN_WAITS,
    ) -> Deadlines:
        """Every timeout of a recovery, in seconds, from the one knob; their order is asserted. See `derivation`.

        Args:
            patience: as for `deadline`.
            origin: where each value comes from, for the names in a refusal.
            waits: what makes the launcher wait for `{seconds}`, as a remedy.

        Raises:
            Refused: when TTP_OT leaves no room for stopping and ending within the deadline or the launcher's patience,
                or is too short for an order, or hangs are to be found faster than ranks can be heard.
        """
        total = self.deadline(patience)
        consult = self.tft_clusterd_wait if self.clusterd else 0.0
        if patience is not None:  # the launcher does not wait for a cluster manager
            consult = min(consult, total / 4)
            total -= consult
        stop = min(STOP_AT_MOST, total / 4)
        leave = min(EXIT_AT_MOST, total / 8)
        dump = self.tft_dump_seconds if self.tft_dump_seconds is not None else total - stop - leave
        lost = min(10.0, stop / 2)
        # Half of the dump for one order: a rank that hangs in it still leaves time for a second attempt without it.
        found = Deadlines(heartbeat=min(1.0, lost / 4), heartbeat_lost=lost, stop=stop, order=dump / 2, dump=dump,
                          exit=leave, reboot=self.tft_reboot_wait * self.enable_worker_reboot,
                          consult=consult, hang=self._hang(),
                          hang_fixed=self.tft_hang_seconds > 0)  # fmt: skip
        name = name_of("tft_dump_seconds", origin)
        if not found.heartbeat < found.heartbeat_lost < found.stop < total or stop + dump + leave > total + 1e-9:
            raise self._does_not_fit(name, found, patience, waits)
        if found.order < 2 * found.heartbeat:
            raise Refused(
                name,
                f"a dump of {dump:g} s leaves {found.order:g} s for one order, less than two heartbeats of"
                f" {found.heartbeat:g} s, by which a rank is judged",
                f"set it to at least {_rounded_up(4 * found.heartbeat)}, or leave it out for {total - stop - leave:g}",
            )
        if found.hang_fixed and found.hang < 2 * found.heartbeat:
            raise Refused(
                "--tft-hang-seconds",
                f"{found.hang:g} s are less than two heartbeats of {found.heartbeat:g} s, by which a rank is judged",
                f"set it to at least {_rounded_up(2 * found.heartbeat)}, to 0 for a limit by the step time, or to -1"
                " for no watch",
            )
        return found

    def _does_not_fit(self, name: str, found: Deadlines, patience: float | None, waits: str) -> Refused:
        """A dump whose length was given, and is more than what stopping, leaving and asking leave of the deadline."""
        total = self.deadline(patience)
        asking = found.consult if patience is not None else 0.0
        ending = f"{found.stop:g} s for stopping the ranks and {found.exit:g} s for their exit are kept"
        kept = f"{asking:g} s for a decision of ClusterD, {ending}" if asking else ending
        at_most = f"set {name} to at most {math.floor(total - asking - found.stop - found.exit)}"
        needed = _deadline_for(found.dump, self.tft_clusterd_wait if asking else 0.0)
        if patience is None or (total == self.tft_deadline and needed + LAUNCHER_MARGIN <= patience):
            longer = f", or --tft-deadline to at least {needed}" if needed <= LONGEST else ""
            reason = f"a dump of {found.dump:g} s does not fit into --tft-deadline {total:g} s, of which {kept}"
            return Refused(name, reason, at_most + longer)
        wanted = max(needed, math.ceil(self.tft_deadline))
        raised = f" and --tft-deadline to {wanted}" if wanted > self.tft_deadline else ""
        longer = f"{waits.format(seconds=math.ceil(wanted + LAUNCHER_MARGIN))}{raised}; or "
        return Refused(
            name,
            f"a dump of {found.dump:g} s does not fit: the launcher kills the survivors of a fault after {patience:g}"
            f" s, so that {total:g} s are left for everything, of which {kept}",
            (longer if wanted <= LONGEST else "") + at_most,
        )

    def derivation(
        self, patience: float | None = None, origin: Mapping[str, str] | None = None
    ) -> dict[str, tuple[str, str]]:
        """For the deadline and each field of `Deadlines`: how its seconds follow (a formula), and what it limits."""
        short = self.deadline(patience) < self.tft_deadline
        rest, given = "deadline - stop - exit", name_of("tft_dump_seconds", origin)
        return {
            "deadline": ("max(10, launcher patience - 3)" if short else "--tft-deadline",
                         "a fault until the end of the job"),
            "stop": ("min(30, deadline / 4)", "the first sign of a fault until every rank has stopped and reported"),
            "exit": ("min(15, deadline / 8)", "the decision to end until every rank has left"),
            "dump": (given if self.tft_dump_seconds is not None else rest,
                     "all attempts to save, and all tries to repair"),
            "order": ("dump / 2", "one order to a rank; a second attempt fits in"),
            "heartbeat_lost": ("min(10, stop / 2)", "no sign of life until a rank counts as silent"),
            "heartbeat": ("min(1, heartbeat_lost / 4)", "from one sign of life of a rank to the next"),
            "register": ("300", "the first rank's arrival until a warning that others are missing; ends nothing"),
            "reboot": ("--tft-reboot-wait" if self.enable_worker_reboot else "0",
                       "the stop until a newcomer is ready; 0 without --enable-worker-reboot"),
            "consult": (self._consult_derivation(patience), "a decision of ClusterD; 0 where nobody is asked"),
            "hang": self._hang_derivation(),
        }  # fmt: skip

    def _consult_derivation(self, patience: float | None) -> str:
        if not self.clusterd:
            return "0"
        return "--tft-clusterd-wait" if patience is None else "min(--tft-clusterd-wait, deadline / 4)"

    def _hang_derivation(self) -> tuple[str, str]:
        limits = "no progress until a rank that others wait for is ended"
        if self.tft_hang_seconds < 0:
            return "0", f"{limits}; 0: no watch"
        if self.tft_hang_seconds > 0:
            return "--tft-hang-seconds", limits
        return f"{self._hang():g}", f"{limits}; three times the slowest usual step where that is longer"

    def _hang(self) -> float:
        if self.tft_hang_seconds:
            return max(0.0, self.tft_hang_seconds)
        return HANG_RESTARTED if self.enable_worker_reboot else HANG_DUMPED


def _deadline_for(dump: float, consult: float) -> int:
    """The smallest whole deadline in which a dump of `dump` seconds fits, beside a decision that takes `consult`."""
    alone = min(dump + STOP_AT_MOST + EXIT_AT_MOST, dump * 8 / 5)
    return math.ceil(min(alone + consult, alone * 4 / 3))


def _rounded_up(seconds: float) -> str:
    return f"{math.ceil(seconds * 100) / 100:g}"


def build(layers: list[tuple[str, Mapping[str, Any]]]) -> tuple[Settings, dict[str, str]]:
    """Merge layers of (origin, values), the first one winning, into settings and the origin of each value.

    Raises:
        Refused: a value of the wrong type or out of range; the message names its flag and origin.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, layer in layers:
        for key, value in layer.items():
            if key not in values:
                values[key], origin[key] = value, name
    try:
        settings = Settings(**values)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = str(first["loc"][0])
        told = first["msg"].removeprefix("Value error, ").lower()
        raise Refused(
            name_of(key, origin),
            f"{told} (got {yaml_files.shown(first['input'])} from {origin.get(key, 'default')})",
            _NO_EMPTY if told == _EMPTY else "give a value that fits, see --help",
        ) from None
    for key in Settings.model_fields:
        origin.setdefault(key, "default")
    return settings, origin


def flag_of(key: str) -> str:
    """The name under which a user knows a field."""
    return VARIABLES.get(key, "--" + key.replace("_", "-"))


def name_of(key: str, origin: Mapping[str, str] | None = None) -> str:
    """The name under which a user has set a field, by its origin: a field without a flag may stand in YAML as well."""
    where = (origin or {}).get(key, "default")
    if key not in VARIABLES or where.startswith(("environment", "default")):
        return flag_of(key)
    return key.replace("_", "-") if where.startswith(("preset", "file")) else key


def meaning(key: str) -> str:
    """One line on what a field does."""
    return Settings.model_fields[key].description or ""


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a YAML file for `--tft-config`, for editors that complete and check."""
    raw = Settings.model_json_schema()["properties"]
    plain = {key: {word: value for word, value in rule.items() if word != "title"} for key, rule in raw.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mindspeed_tft: YAML for --tft-config",
        "type": "object",
        "properties": {key.replace("_", "-"): rule for key, rule in plain.items()},
        # As the loader takes them; only the spelling with dashes is to be offered.
        "patternProperties": {f"^{key.replace('_', '[-_]')}$": rule for key, rule in plain.items()},
        "additionalProperties": False,
    }


def load_yaml(name: str, presets: Path) -> tuple[str, dict[str, Any]]:
    """A preset by its name, or a YAML file by its path: its origin in words, and its values.

    Keys are flags, with dashes or underscores.

    Raises:
        Refused: no such preset or file, unreadable YAML, an unknown key (with the nearest right name), a key twice.
    """
    origin, path = _place_of(name, presets)
    try:
        data = yaml_files.load(path)
    except yaml_files.Unreadable as exc:
        raise Refused("--tft-config", f"{path} {exc.reason}", exc.remedy) from None
    if data is None:
        return origin, {}
    if not isinstance(data, dict):
        raise Refused("--tft-config", f"{path} holds a {type(data).__name__}, not a mapping of flags to values",
                      "write lines like 'optimizer-replica-num: 2'")  # fmt: skip
    values: dict[str, Any] = {}
    for key, value in data.items():
        plain = _known_key(str(key), path)
        if plain in values:
            raise Refused("--tft-config", f"{path} has {yaml_files.shown(key)} in two spellings", "keep one of them")
        why = yaml_files.why_no_number(value) if _is_number(plain) else ""
        if why:
            reason = f"{why} (got {yaml_files.shown(value)} from {origin})"
            raise Refused(name_of(plain, {plain: origin}), reason, "write it as a plain decimal number")
        values[plain] = value
    return origin, values


def _place_of(name: str, presets: Path) -> tuple[str, Path]:
    """The origin that a preset or file is called by, and where it is."""
    if not name.strip():
        raise Refused("--tft-config", _EMPTY, _NO_EMPTY)
    shown = yaml_files.shown(name)
    known = ", ".join(sorted(path.stem for path in presets.glob("*.yaml")))
    remedy = f"use one of {known}, or the path of a YAML file"
    try:
        if Path(name).name == name and (presets / f"{name}.yaml").is_file():
            return f"preset {name}", presets / f"{name}.yaml"
        if Path(name).is_file():
            return f"file {name}", Path(name)
    except OSError as exc:  # a name too long for a file, a folder that may not be entered
        raise Refused("--tft-config", f"{shown} cannot be looked for ({exc.strerror})", remedy) from None
    raise Refused("--tft-config", f"there is neither a preset nor a file named {shown}", remedy)


def _is_number(key: str) -> bool:
    annotation = Settings.model_fields[key].annotation
    return bool({int, float} & {annotation, *get_args(annotation)})


# What users of the environment and of the command line may take for a key.
_NO_KEYS = {
    **{variable: f"write {key.replace('_', '-')}" for key, variable in VARIABLES.items()},
    "MINDIO_WAIT_MINDX_TIME": "write tft-clusterd-wait",
    "MINDX_TASK_ID": "write tft-clusterd-job",
    "HIGH_AVAILABILITY": "write 'enable-high-availability: true', beside it 'enable-hbmfault-repair: true' for retry,"
                         " and 'enable-worker-reboot: true' for recover",
    "tft_config": "a file cannot name another one: write all keys into this one",
}  # fmt: skip


def _known_key(key: str, path: Path) -> str:
    plain = key.replace("-", "_")
    if plain in Settings.model_fields:
        return plain
    other = _NO_KEYS.get(key) or _NO_KEYS.get(plain.lstrip("_"))
    remedy = other or nearest(plain.replace("_", "-"), [name.replace("_", "-") for name in Settings.model_fields])
    raise Refused("--tft-config", f"{path} has an unknown key {yaml_files.shown(key)}", remedy)


def nearest(word: str, known: Sequence[str]) -> str:
    """The remedy for a name that is unknown: the one that was meant, or all that there are."""
    near = difflib.get_close_matches(word[:LONGEST_NAME], known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}" if near else f"use one of {', '.join(known)}"


def from_environment(environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """What the environment says, in the names that users of this field already set: layers of (origin, values).

    HIGH_AVAILABILITY can only switch on: a strategy that it does not name is left to the flags. A variable that is set
    to nothing at all is none.

    Raises:
        Refused: an unknown word in HIGH_AVAILABILITY, or none, a TTP_OT that is not a number.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    words = [word.strip().lower() for word in environ.get("HIGH_AVAILABILITY", "").split(",") if word.strip()]
    for word in words:
        if word not in STRATEGIES:
            raise Refused("HIGH_AVAILABILITY",
                          f"unknown word {yaml_files.shown(word)} (known are {', '.join(STRATEGIES)})",
                          "use a comma list of dump, retry and recover; the other is not in this version")  # fmt: skip
    if environ.get("HIGH_AVAILABILITY") and not words:
        raise Refused("HIGH_AVAILABILITY", f"{yaml_files.shown(environ['HIGH_AVAILABILITY'])} names no strategy",
                      "use a comma list of dump, retry and recover, or unset it")  # fmt: skip
    if words:  # any strategy stands on the dump
        wanted = dict.fromkeys(["enable_high_availability", *(STRATEGIES[word] for word in words)], True)
        layers.append(("environment HIGH_AVAILABILITY", wanted))
    if environ.get("TTP_ADDR"):
        layers.append(("environment TTP_ADDR", {"tft_controller_address": environ["TTP_ADDR"]}))
    if environ.get("TTP_OT"):
        try:
            seconds = float(environ["TTP_OT"])
        except ValueError:
            raise Refused("TTP_OT", f"{yaml_files.shown(environ['TTP_OT'])} is not a number of seconds",
                          "set it to the seconds that a dump may take") from None  # fmt: skip
        layers.append(("environment TTP_OT", {"tft_dump_seconds": seconds}))
    if environ.get("MINDIO_WAIT_MINDX_TIME"):
        wait = {"tft_clusterd_wait": environ["MINDIO_WAIT_MINDX_TIME"]}
        layers.append(("environment MINDIO_WAIT_MINDX_TIME", wait))
    return layers


def from_platform(environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """What ClusterD's operator says in the environment of a job, as a layer (origin, values): the weakest of all."""
    values: dict[str, Any] = {}
    job, host = environ.get("MINDX_TASK_ID"), environ.get("MINDX_SERVER_IP")
    if job:
        values["tft_clusterd_job"] = job
    if job and host and environ.get("PROCESS_RECOVER", "").strip().lower() == "on":
        if environ.get("LOCAL_PROXY_ENABLE", "").strip().lower() == "on":
            host = "127.0.0.1"  # a proxy beside the job speaks TLS for it
        values["tft_clusterd"] = f"http://{f'[{host}]' if ':' in host else host}:{CLUSTERD_PORT}"
    return f"environment {PLATFORM}", values
