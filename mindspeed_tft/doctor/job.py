"""What the doctor knows of the job that is going to run: its flags, its environment, and how many hosts it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_tft.control.config import DEFAULT_PORT
from mindspeed_tft.settings import Refused, Settings

TORCHRUN_PORT = 29500  # of its rendezvous, where --master-port does not say another


@dataclass(frozen=True)
class Job:
    """One host's view of the job."""

    words: tuple[str, ...]  # flags of the training program, those of Megatron among them
    environ: Mapping[str, str]
    settings: Settings  # the defaults where the flags are refused
    refusals: tuple[Refused, ...] = ()
    nodes: int = 1
    port: int | None = None  # of the controllers; None: the default with several hosts, none with one
    tls_dir: str | None = None
    insecure: bool = False
    timeout: float = 3.0  # seconds for one attempt of anything
    bind: str = ""  # the only address on which this host may listen; "": all of it
    skew: float = 0.0  # seconds by which this host's clock is taken to be ahead; for tests
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def on(self) -> bool:
        """The training program has asked for protection."""
        return self.settings.enable_high_availability

    def option(self, *names: str) -> str | None:
        """The value of an option of the training program, the last one given; None: it was not given."""
        return option(self.words, *names)

    def number(self, name: str, default: int) -> int:
        """A whole number that an option of Megatron gives; what is none is Megatron's to refuse."""
        text = self.option(name)
        return int(text) if text is not None and text.isdigit() else default

    @property
    def key_password_file(self) -> str | None:
        return self.settings.tft_tls_key_password_file

    @property
    def decrypt(self) -> str | None:
        return self.settings.tft_tls_decrypt

    def with_keys_of(self, own: Job) -> Job:
        """With the certificates of another view, and its way to their key. Who names a function that opens a key runs
        it, and who names a directory hears what is in it: nobody on another host may."""
        names = ("tft_tls_dir", "tft_tls_key_password_file", "tft_tls_decrypt")
        settings = self.settings.model_copy(update={name: getattr(own.settings, name) for name in names})
        return replace(self, settings=settings, tls_dir=own.tls_dir)

    @property
    def controller_port(self) -> int:
        return DEFAULT_PORT if self.port is None else self.port

    @property
    def save(self) -> str | None:
        return self.option("--save")

    @property
    def incidents(self) -> str | None:
        """Where incident reports go; None where the flags do not say it."""
        if self.settings.tft_incident_dir:
            return self.settings.tft_incident_dir
        return f"{self.save}/tft_incidents" if self.save else None


def option(words: Sequence[str], *names: str) -> str | None:
    """The value of an option on a command line in any of its spellings, the last one given."""
    found: str | None = None
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in names:
            continue
        if equals:
            found = value
        elif position + 1 < len(words):
            found = words[position + 1]
    return found


def describe(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    nodes: int = 1,
    port: int | None = None,
    tls_dir: str | None = None,
    insecure: bool = False,
    timeout: float = 3.0,
    bind: str = "",
    skew: float = 0.0,
) -> Job:
    """A job with these flags in this environment, by the machinery of `tftctl config`. What is given here wins."""
    from mindspeed_tft.cli import config  # the command has it, and nothing of ours but commands needs it

    found = config.resolve(words, environ)
    settings = found.settings or Settings()
    return Job(
        words=tuple(words),
        environ=environ,
        settings=settings,
        refusals=found.refusals,
        nodes=nodes,
        port=settings.tft_controller_port if port is None else port,
        tls_dir=tls_dir or settings.tft_tls_dir,
        insecure=insecure or settings.tft_insecure,
        timeout=timeout,
        bind=bind,
        skew=skew,
        origin=found.origin,
    )
