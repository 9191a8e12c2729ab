"""The validated settings of one job: one frozen object, built once at start-up.

Values come from the environment, Megatron's command line, a YAML preset and the defaults below, in that order of
precedence; `arguments` collects them. What cannot work is refused here or there with a message that names the flag,
the reason and the remedy. This module knows neither Megatron nor torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mindspeed_tft.engine.types import Deadlines

STRATEGIES = {"dump": "enable_high_availability", "retry": "enable_hbmfault_repair",
              "recover": "enable_worker_reboot", "elastic-training": "enable_elastic_training"}  # fmt: skip


HANG_RESTARTED = 5.0  # seconds without progress, at least, until a rank is ended that can be started again alone
HANG_DUMPED = 30.0  # the same where the end of a rank is the end of the job: a storage hiccup must not be
LAUNCHER_MARGIN = 3.0  # seconds between our last deadline and a launcher's SIGKILL


class Refused(ValueError):
    """A setting that cannot work. The message names the flag, the reason and the remedy."""

    def __init__(self, flag: str, reason: str, remedy: str) -> None:
        super().__init__(f"{flag}: {reason}. Remedy: {remedy}.")
        self.flag, self.reason, self.remedy = flag, reason, remedy


class Settings(BaseModel):
    """Everything that the user may set. Field names are the flags with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_high_availability: bool = False
    enable_hbmfault_repair: bool = False
    enable_worker_reboot: bool = False
    enable_elastic_training: bool = False
    distributed_optimizer_no_replica: bool = False
    optimizer_replica_num: int = Field(default=2, ge=2)
    tft_platform: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    tft_deadline: float = Field(default=120.0, ge=10.0, le=86400.0)  # seconds from a fault to the end of the job
    tft_reboot_wait: float = Field(default=60.0, gt=0, le=86400.0)  # seconds, from the stop until a newcomer is ready
    tft_hang_seconds: float = Field(default=0.0, ge=-86400.0, le=86400.0)  # 0: by the step time; negative: no watch
    tft_warm_standby: bool = True  # with worker reboot: a process per node that has imported everything and waits
    tft_dump_seconds: float | None = Field(default=None, gt=0)  # TTP_OT: the dump's share of the deadline
    tft_controller_address: str | None = None  # TTP_ADDR
    tft_controller_port: int | None = Field(default=None, ge=1, le=65535)
    tft_tls_dir: str | None = None
    tft_insecure: bool = False
    tft_incident_dir: str | None = None
    tft_fault_rules: str | None = None

    @property
    def replicas(self) -> int:
        return 1 if self.distributed_optimizer_no_replica else self.optimizer_replica_num

    def strategies(self) -> tuple[str, ...]:
        """What the engine may decide for, the weakest last."""
        wanted = {"retry": self.enable_hbmfault_repair, "recover": self.enable_worker_reboot}
        return (*(name for name, on in wanted.items() if on), "dump")

    def deadlines(self, patience: float | None = None) -> Deadlines:
        """Every timeout of a recovery, in seconds, from the one knob; their order is asserted.

        Args:
            patience: seconds that the launcher lets survivors live; where it is shorter than the knob, it counts.

        Raises:
            Refused: when TTP_OT leaves no room for stopping and ending within the deadline, or hangs are to be found
                faster than ranks can be heard.
        """
        total = self.tft_deadline
        if patience is not None and self.tft_dump_seconds is None:
            total = min(total, max(10.0, patience - LAUNCHER_MARGIN))
        stop = min(30.0, total / 4)
        leave = min(15.0, total / 8)
        dump = self.tft_dump_seconds if self.tft_dump_seconds is not None else total - stop - leave
        lost = min(10.0, stop / 2)
        # Half of the dump for one order: a rank that hangs in it still leaves time for a second attempt without it.
        found = Deadlines(heartbeat=min(1.0, lost / 4), heartbeat_lost=lost, stop=stop, order=dump / 2, dump=dump,
                          exit=leave, reboot=self.tft_reboot_wait * self.enable_worker_reboot, hang=self._hang(),
                          hang_fixed=self.tft_hang_seconds > 0)  # fmt: skip
        if not found.heartbeat < found.heartbeat_lost < found.stop < total or stop + dump + leave > total + 1e-9:
            raise Refused(
                "TTP_OT",
                f"a dump of {dump:g} s does not fit into --tft-deadline {total:g} s, of which {stop:g} s are kept for"
                f" stopping the ranks and {leave:g} s for their exit",
                f"set --tft-deadline to at least {stop + dump + leave:g}, or lower TTP_OT",
            )
        if found.hang_fixed and found.hang < 2 * found.heartbeat:
            raise Refused(
                "--tft-hang-seconds",
                f"{found.hang:g} s are less than two heartbeats of {found.heartbeat:g} s, by which a rank is judged",
                f"set it to at least {2 * found.heartbeat:g}, to 0 for a limit by the step time, or to -1 for no watch",
            )
        return found

    def _hang(self) -> float:
        if self.tft_hang_seconds:
            return max(0.0, self.tft_hang_seconds)
        return HANG_RESTARTED if self.enable_worker_reboot else HANG_DUMPED


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
        raise Refused(
            flag_of(key), f"{first['msg'].lower()} (got {first['input']!r} from {origin.get(key, 'default')})",
            "give a value that fits, see --help",
        ) from None  # fmt: skip
    for key in Settings.model_fields:
        origin.setdefault(key, "default")
    return settings, origin


def flag_of(key: str) -> str:
    """The name under which a user knows a field."""
    return {"tft_dump_seconds": "TTP_OT", "tft_controller_address": "TTP_ADDR"}.get(key, "--" + key.replace("_", "-"))


def load_yaml(name: str, presets: Path) -> dict[str, Any]:
    """A preset by its name, or a YAML file by its path. Keys are flags, with dashes or underscores.

    Raises:
        Refused: no such preset or file, unreadable YAML, an unknown key (with the nearest right name).
    """
    path = presets / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in presets.glob("*.yaml")))
        raise Refused("--tft-config", f"there is neither a preset nor a file named {name!r}",
                      f"use one of {known}, or the path of a YAML file")  # fmt: skip
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise Refused("--tft-config", f"{path} is not readable YAML: {exc}", "correct the file") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise Refused("--tft-config", f"{path} holds a {type(data).__name__}, not a mapping of flags to values",
                      "write lines like 'optimizer-replica-num: 2'")  # fmt: skip
    return {_known_key(str(key), path): value for key, value in data.items()}


def _known_key(key: str, path: Path) -> str:
    plain = key.replace("-", "_")
    if plain in Settings.model_fields:
        return plain
    near = difflib.get_close_matches(plain, Settings.model_fields, n=1, cutoff=0.0)[0].replace("_", "-")
    raise Refused("--tft-config", f"{path} has an unknown key {key!r}", f"did you mean {near!r}?".rstrip("?"))


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says, in the names that users of this field already set.

    Raises:
        Refused: an unknown word in HIGH_AVAILABILITY, a TTP_OT that is not a number.
    """
    found: dict[str, Any] = {}
    words = [word.strip() for word in environ.get("HIGH_AVAILABILITY", "").split(",") if word.strip()]
    for word in words:
        if word not in STRATEGIES:
            raise Refused("HIGH_AVAILABILITY", f"unknown word {word!r} (known are {', '.join(STRATEGIES)})",
                          "use a comma list of dump, retry and recover; the other is not in this version")  # fmt: skip
        found[STRATEGIES[word]] = True
    if words:  # any strategy stands on the dump
        found["enable_high_availability"] = True
    if environ.get("TTP_ADDR"):
        found["tft_controller_address"] = environ["TTP_ADDR"]
    if environ.get("TTP_OT"):
        try:
            found["tft_dump_seconds"] = float(environ["TTP_OT"])
        except ValueError:
            raise Refused("TTP_OT", f"{environ['TTP_OT']!r} is not a number of seconds",
                          "set it to the seconds that a dump may take") from None  # fmt: skip
    return found
