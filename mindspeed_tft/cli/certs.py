"""`tftctl certs`: a small certificate authority, a certificate for each host, and whether they are still good."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from cryptography import x509
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mindspeed_tft.cli import consoles
from mindspeed_tft.control import authority, certificates, tls
from mindspeed_tft.control.authority import CA_DAYS, NODE_DAYS, Authority, AuthorityError
from mindspeed_tft.control.certificates import Unfit
from mindspeed_tft.control.config import ControlRefused

FAILED, SOON = 2, 1  # exit status
COPY = "copy each directory to its host, as the one of --tft-tls-dir; running jobs read them again by themselves"

app = typer.Typer(
    name="certs",
    help="Make, check, renew and revoke the certificates of hosts and operators. Exit status: 0, or 2 when it could not"
    " be done; check: see there.",
    no_args_is_help=True,
)

Dir = Annotated[Path, typer.Option("--dir", "-d", metavar="DIR", help="Directory of the authority, see init.")]
Days = Annotated[int, typer.Option("--days", min=1, help="Days that the certificates hold.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
HERE = Path("tft-certs")


@app.command("init")
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR")] = HERE,
    days: Annotated[int, typer.Option("--days", min=1, help="Days that the authority's certificate holds.")] = CA_DAYS,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a certificate authority: an EC key on P-256, readable by you alone, and its certificate.

    Keep the directory off the training hosts: whoever has ca.key can make himself a host or an operator.
    """

    def work() -> dict[str, Any]:
        made = Authority.create(directory, days, force)
        return {"directory": str(made.directory), "days": days}

    _do("init", work, as_json, lambda found: f"made an authority in {found['directory']}; next: tftctl certs node HOST"
        f" ... --dir {directory}")  # fmt: skip


@app.command("node")
def node(
    hosts: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST[,NAME|ADDRESS...]...",
            help="The name that `uname -n` tells there; after commas what else others call it, above all the address"
            " that is given as MASTER_ADDR or TTP_ADDR for the host of rank 0.",
        ),
    ],
    directory: Dir = HERE,
    days: Days = NODE_DAYS,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a certificate for each host, and a directory DIR/HOST with all that goes into its --tft-tls-dir."""
    _issue("node", hosts, directory, as_json,
           lambda made, host: made.node(host.split(",")[0], host.split(",")[1:], days, force))  # fmt: skip


@app.command("operator")
def operator(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Who: it stands in the log of what was asked.")],
    directory: Dir = HERE,
    days: Days = NODE_DAYS,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a certificate for an operator: `tftctl ... --controller HOST:PORT --tls-dir DIR/NAME` from another host."""
    _issue("operator", names, directory, as_json, lambda made, name: made.operator(name, days, force))


@app.command("metrics")
def metrics(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Who reads: for example prometheus.")],
    directory: Dir = HERE,
    days: Days = NODE_DAYS,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a certificate that reads metrics off loopback and can do nothing else: for tls_config of Prometheus."""
    _issue("metrics", names, directory, as_json, lambda made, name: made.metrics(name, days, force))


@app.command("rotate")
def rotate(
    directory: Dir = HERE,
    days: Annotated[
        Optional[int],  # noqa: UP045  typer reads this annotation on Python 3.10 as well
        typer.Option("--days", min=1, help=f"Days that what is made holds (default {NODE_DAYS}, authority {CA_DAYS})."),
    ] = None,
    new_authority: Annotated[
        bool, typer.Option("--authority", help="A new authority beside the old one, trusted by all from then on.")
    ] = False,
    retire_old: Annotated[bool, typer.Option("--retire-old", help="The old authority is trusted no longer.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make new keys and certificates for all hosts and operators, with the names that they have.

    A new authority without an interruption, each step followed by a copy to all hosts: rotate --authority, rotate,
    rotate --retire-old.
    """
    if new_authority and retire_old:
        raise typer.BadParameter("--authority begins the change of the authority, --retire-old ends it; give one")

    def work() -> dict[str, Any]:
        made = Authority(directory)
        passed_over: list[str] = []
        if new_authority:
            changed = made.replace(days or CA_DAYS)
        elif retire_old:
            changed = made.retire()
        else:
            changed = made.rotate(days or NODE_DAYS)
            passed_over = [path.name for path in made.holders() if path not in changed]
        return {"directory": str(directory), "changed": [str(path) for path in changed], "passed_over": passed_over}

    def words(found: dict[str, Any]) -> str:
        revoked = f"{', '.join(found['passed_over'])}: revoked, so nothing was made for it (certs node --force does)"
        return "\n".join([*([revoked] if found["passed_over"] else []), _copy(found)])

    _do("rotate", work, as_json, words)


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(metavar="HOST|NAME")],
    directory: Dir = HERE,
    as_json: AsJson = False,
) -> None:
    """Trust nothing any more that was signed for a host or operator: its name goes on revoked.crl.

    Copy that file into the --tft-tls-dir of all hosts. Running jobs read it within moments and cut that host off.
    """

    def work() -> dict[str, Any]:
        made = Authority(directory)
        revoked = [dataclasses.asdict(one) for one in made.revoke(name)]
        return {"directory": str(directory), "revoked": revoked, "list": str(directory / authority.CRL)}

    def words(found: dict[str, Any]) -> str:
        serials = ", ".join(one["serial"] for one in found["revoked"])
        return (
            f"revoked {serials} of {name}; copy {found['list']} into --tft-tls-dir of all hosts. If the host stays, it"
            f" needs a new one: tftctl certs node {name} --force --dir {directory}"
        )

    _do("revoke", work, as_json, words)


@app.command("check")
def check(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What --tft-tls-dir names, or the directory of an authority.")
    ],
    host: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--host", metavar="NAME", help="The host that it has to be for (default: this one, on a host)."),
    ] = None,
    password_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--tft-tls-key-password-file", metavar="FILE", help="As the flag of the same name."),
    ] = None,
    decrypt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--tft-tls-decrypt", metavar="MODULE:FUNCTION", help="As the flag of the same name."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look whether certificates serve: authority, dates, key, names, who can read the key, what was revoked.

    Exit status: 0, or 1 when one expires within 30 days or its key can be read by others, 2 when one does not serve.
    """
    access = tls.KeyAccess(str(password_file) if password_file else None, decrypt)
    if (directory / "ca.key").exists():
        holders = sorted(path.parent for path in directory.glob("*/node.crt"))
        trusted = [path for path in (directory / "ca.crt", directory / "ca-old.crt") if path.exists()]
        found = [_judge_authority(directory), *(_judge(path, path.name, access, trusted) for path in holders)]
    else:
        name = host or os.uname().nodename
        found = [_judge(tls.directory_of(str(directory), name), name, access)]
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=2))
    else:
        _show(found, consoles.for_tables())
    raise typer.Exit(max(one.status for one in found))


# ------------------------------------------------------------------------------------------------- check


@dataclass
class Judged:
    """One certificate, and all that is to be said of it."""

    directory: str
    names: tuple[str, ...] = ()
    serial: str = ""
    signed_by: str = ""
    ends: str = ""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        return FAILED if self.errors else SOON if self.warnings else 0

    def describe(self, certificate: x509.Certificate) -> None:
        self.names, self.serial = certificates.names(certificate), certificates.serial(certificate)
        self.signed_by = certificates.common_name_of(certificate.issuer)
        self.ends = certificate.not_valid_after_utc.isoformat()
        if (soon := certificates.expires_soon(certificate)) and not certificates.out_of_date(certificate):
            self.warnings.append(f"{soon}; tftctl certs rotate")

    def look_at_mode(self, key: Path) -> None:
        mode = stat.S_IMODE(key.stat().st_mode)
        if mode & 0o077:
            self.warnings.append(f"{key.name} can be read by others (mode {mode:o}); chmod 600 {key}")


def _judge(directory: Path, host: str, access: tls.KeyAccess, trusted: Sequence[Path] = ()) -> Judged:
    """The directory of a host or operator; `trusted`: where the certificates of its authority are, besides."""
    found = Judged(str(directory))
    try:
        chain = certificates.read_all((directory / "node.crt").read_bytes())
        found.describe(chain[0])
        found.look_at_mode(directory / "node.key")
        ours = certificates.read_all(tls.load(directory, access).ca)
        first = certificates.first_to_end(chain, ours)
        if first != chain[0] and (soon := certificates.expires_soon(first)):
            remedy = certificates.renewal(first, chain[0])
            found.warnings.append(f"{certificates.which(first, chain[0])}{soon}; {remedy.replace('`', '')}")
        person = certificates.is_operator(chain[0]) or certificates.is_reader(chain[0])
        if not person and not certificates.names_host(found.names, host):
            found.errors.append(f"it is not for {host}; tftctl certs node {host}")
        authorities = [one for path in trusted for one in certificates.read_all(path.read_bytes())]
        if authorities and (why := certificates.chain_break(chain, authorities)):
            found.errors.append(f"{why}; tftctl certs rotate")
        if why := certificates.unfit_for(chain[0], server=False):
            found.errors.append(why)
    except OSError as error:
        found.errors.append(f"{error.filename} cannot be read ({error.strerror})")
    except (ControlRefused, Unfit) as error:
        found.errors.append(str(error).removeprefix("--tft-tls-dir: "))
    return found


def _judge_authority(directory: Path) -> Judged:
    found = Judged(str(directory))
    try:
        (certificate, *_) = certificates.read_all((directory / "ca.crt").read_bytes())
        found.describe(certificate)
        found.look_at_mode(directory / "ca.key")
        if why := certificates.out_of_date(certificate):
            found.errors.append(f"{why}; tftctl certs rotate --authority")
        Authority(directory)
    except OSError as error:
        found.errors.append(f"{error.filename} cannot be read ({error.strerror})")
    except (AuthorityError, Unfit) as error:
        found.errors.append(str(error))
    return found


def _show(found: Sequence[Judged], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "directory", "for", "until", "signed by"):
        table.add_column(column, overflow="fold")
    for one in found:
        mark = {0: "[green]good[/]", SOON: "[yellow]soon[/]", FAILED: "[red]bad[/]"}[one.status]
        table.add_row(mark, escape(one.directory), escape(", ".join(one.names)), one.ends[:10], escape(one.signed_by))
    console.print(table)
    for one in found:
        for word, texts in (("error", one.errors), ("warning", one.warnings)):
            for text in texts:
                console.print(f"{word}: {one.directory}: {text}", markup=False, highlight=False)


# -------------------------------------------------------------------------------------------------- make


def _issue(
    command: str, names: Sequence[str], directory: Path, as_json: bool, make: Callable[[Authority, str], Path]
) -> None:
    def work() -> dict[str, Any]:
        made = Authority(directory)
        return {"directory": str(directory), "changed": [str(make(made, name)) for name in names]}

    _do(command, work, as_json, _copy)


def _copy(found: dict[str, Any]) -> str:
    if not found["changed"]:
        return "nothing to change: no host has a certificate"
    return "\n".join([*found["changed"], COPY])


def _do(
    command: str, work: Callable[[], dict[str, Any]], as_json: bool, words: Callable[[dict[str, Any]], str]
) -> None:
    try:
        found = work()
    except (AuthorityError, Unfit, OSError) as error:
        print(f"tftctl certs {command}: error: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    print(json.dumps(found, indent=2) if as_json else words(found))
