"""The TLS directory of this host: whether its files serve, whom they name, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mindspeed_tft.control import certificates, tls
from mindspeed_tft.control.config import ControlRefused
from mindspeed_tft.doctor.findings import Finding, green, red, yellow
from mindspeed_tft.doctor.job import Job
from mindspeed_tft.doctor.names import own_name


def directory(job: Job) -> Path | None:
    """Where the files of this host are; None without TLS."""
    return None if job.tls_dir is None else tls.directory_of(job.tls_dir, own_name())


def identity(job: Job, known: tls.Identity | None = None) -> tls.Identity | None:
    """What this host shows and trusts; None without TLS.

    Args:
        known: as it was a while ago; a key that did not change since is not opened again.

    Raises:
        ControlRefused: the files do not serve.
    """
    where = directory(job)
    return None if where is None else tls.load(where, tls.KeyAccess(job.key_password_file, job.decrypt), known)


def check_tls(job: Job, known: tls.Identity | None = None) -> Iterator[Finding]:
    """The same judgement as that of a controller or relay which starts here; `known` as for `identity`."""
    where = directory(job)
    if where is None:
        if job.nodes == 1:
            yield green("tls", "not needed: a single host opens no port")
        elif job.insecure:
            yield yellow(
                "tls",
                "--tft-insecure: whoever reaches the controller's port may command the job",
                "make certificates (tftctl certs) and give --tft-tls-dir",
            )
        return
    try:
        found = identity(job, known)
    except ControlRefused as error:
        text, _, remedy = str(error).partition("; ")
        yield red("tls", text, remedy)
        return
    assert found is not None
    leaf, names = found.leaf, certificates.names(found.leaf)
    chain = certificates.read_all(found.certificate)
    first = certificates.first_to_end(chain, certificates.read_all(found.ca))
    soon, remedy = certificates.expires_soon(first), certificates.renewal(first, leaf).replace("`", "")
    if why := certificates.out_of_date(first):  # since then
        yield red("tls", f"{where}/node.crt: {certificates.which(first, leaf)}{why}", f"make new ones ({remedy})")
    elif soon:
        yield yellow("tls", f"{where}/node.crt: {certificates.which(first, leaf)}{soon}", f"make new ones ({remedy})")
    else:
        yield green("tls", f"{where}/node.crt holds until {leaf.not_valid_after_utc:%Y-%m-%d}, for {', '.join(names)}")
    if not certificates.names_host(names, own_name()):
        yield red(
            "tls",
            f"{where}/node.crt is for {', '.join(names) or 'nobody'}, and this host calls itself {own_name()}: no"
            " controller would let it in",
            f"make one for it (tftctl certs node {own_name()})",
        )
    for server in (True, False):
        if why := certificates.unfit_for(leaf, server):
            yield red("tls", f"{where}/node.crt: {why}", "make one that fits both (tftctl certs node)")
    mode = (where / "node.key").stat().st_mode
    if mode & 0o077:
        yield yellow("tls", f"{where}/node.key can be read by others (mode {mode & 0o777:o})", "chmod 600 node.key")
