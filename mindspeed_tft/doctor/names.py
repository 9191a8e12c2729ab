"""Names, addresses, interfaces and ports of this host."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.doctor.findings import Finding, green, red, yellow
from mindspeed_tft.doctor.job import TORCHRUN_PORT, Job

LOOKUP = 5.0  # seconds for a name
_INTERFACES = {"GLOO_SOCKET_IFNAME": "gloo", "NCCL_SOCKET_IFNAME": "nccl", "HCCL_SOCKET_IFNAME": "hccl"}


def own_name() -> str:
    """The name by which the control plane knows this host, and which its certificate carries."""
    return os.uname().nodename


def addresses_of(name: str, timeout: float = LOOKUP) -> list[str]:
    """All addresses of a name, each once.

    Args:
        timeout: seconds; the system's own limits add up to half a minute where no name server answers.

    Raises:
        OSError: it has none, or nobody says so in time.
    """
    found: list[list[str] | OSError] = []

    def ask() -> None:
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found.append(list(dict.fromkeys(str(entry[4][0]) for entry in entries)))
        except (OSError, UnicodeError) as error:  # the latter: a word that is too long for a name
            found.append(error if isinstance(error, OSError) else OSError(str(error)))

    thread = threading.Thread(target=ask, name="doctor-name", daemon=True)
    thread.start()
    thread.join(timeout)
    if not found:
        raise socket.gaierror(socket.EAI_AGAIN, f"no name server answers within {timeout:g} s")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def data_address(job: Job) -> str | None:
    """The address that gloo tells others: of its interface, or of this host's name; None where there is none."""
    if job.bind:
        return job.bind
    for name in _names(job.environ.get("GLOO_SOCKET_IFNAME", "")):
        for address in _interface_addresses(name):
            return address
    try:
        return addresses_of(own_name())[0]
    except OSError:
        return None


def check_own_name(job: Job) -> Iterator[Finding]:
    """With several hosts, the name of this one has to lead others here: gloo tells its peers what it stands for."""
    name = own_name()
    try:
        found = addresses_of(name)
    except OSError as error:
        yield (red if job.nodes > 1 else yellow)(
            "host name",
            f"{name}, the name of this host, has no address ({_words(error)}): gloo asks for it",
            f"put `ADDRESS {name}` into /etc/hosts, or the name into DNS, or set GLOO_SOCKET_IFNAME",
        )
        return
    text = f"{name} is {', '.join(found)}"
    if not all(map(is_loopback, found)):
        yield green("host name", text)
    elif job.nodes == 1 or job.bind:
        yield green("host name", f"{text} (loopback, which is enough on one machine)")
    elif job.environ.get("GLOO_SOCKET_IFNAME"):
        yield yellow(
            "host name",
            f"{text}: loopback only. gloo uses {job.environ['GLOO_SOCKET_IFNAME']} instead, others may not",
            f"take {name} out of the 127.* line of /etc/hosts",
        )
    else:
        yield red(
            "host name",
            f"{text}: loopback only ({_hosts_line(name)}), so gloo would tell other hosts to connect to themselves",
            f"take {name} out of the 127.* line of /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )


def _hosts_line(name: str, path: Path = Path("/etc/hosts")) -> str:
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.partition("#")[0].split()
            if name in words[1:] and is_loopback(words[0]):
                return f"{path}:{number}: {line.strip()}"
    except OSError:
        pass  # then it came from elsewhere, as far as we can know
    return f"not from {path}"


def check_hosts(hosts: Sequence[str]) -> Iterator[Finding]:
    """Every host's name has an address as seen from here."""
    missing = 0
    for name in hosts:
        try:
            addresses_of(name)
        except OSError as error:
            missing += 1
            yield red(
                "names",
                f"{name} has no address here ({_words(error)})",
                f"correct the name, or put it into DNS or /etc/hosts of {own_name()}",
            )
    if hosts and not missing:
        yield green("names", f"all {len(hosts)} names have addresses")


def check_interfaces(job: Job) -> Iterator[Finding]:
    """Interfaces that variables name are there, are up, and have addresses."""
    there = psutil.net_if_stats()
    for variable, backend in _INTERFACES.items():
        text = job.environ.get(variable, "")
        if not text:
            continue
        if backend != "gloo":  # these take prefixes, exact names after =, and all but some after ^
            fitting = [name for name in there if _fits(name, text)]
        else:
            fitting = [name for name in _names(text) if name in there]
            lost = [name for name in _names(text) if name not in there]
            if lost:
                yield red(
                    "interfaces",
                    f"{variable}={text}: there is no interface {', '.join(lost)}",
                    f"use one of {', '.join(sorted(there))}",
                )
                continue
        down = [name for name in fitting if not there[name].isup]
        if not fitting or (down and backend == "gloo"):
            what = f"{', '.join(down)} is down" if down else "no interface fits"
            yield red("interfaces", f"{variable}={text}: {what}", f"use one of {', '.join(_up(there))}")
        elif not any(_interface_addresses(name) for name in fitting):
            yield red("interfaces", f"{variable}={text}: it has no address", f"use one of {', '.join(_up(there))}")
        else:
            yield green("interfaces", f"{variable}={text} is up")


def _up(there: Mapping[str, Any]) -> list[str]:
    return sorted(name for name, stats in there.items() if stats.isup)


def _fits(name: str, text: str) -> bool:
    inverse, text = text.startswith("^"), text.lstrip("^")
    exact, text = text.startswith("="), text.lstrip("=")
    found = any(name == word if exact else name.startswith(word) for word in _names(text))
    return found != inverse


def _names(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def _interface_addresses(name: str) -> list[str]:
    """IPv4 first, as gloo prefers it; no addresses that need a scope."""
    found = psutil.net_if_addrs().get(name, [])
    plain = [entry.address for entry in found if entry.family in (socket.AF_INET, socket.AF_INET6)]
    usable = [address for address in plain if not ipaddress.ip_address(address.partition("%")[0]).is_link_local]
    return sorted(usable, key=lambda address: ":" in address)


def rendezvous_port(job: Job) -> int:
    text = job.environ.get("MASTER_PORT", "")
    return int(text) if text.isdigit() else TORCHRUN_PORT


def check_ports(job: Job, *, controller: bool, rendezvous: bool) -> Iterator[Finding]:
    """Ports that servers of the job will want on its first host: of several hosts both, of one what it asks for.

    Args:
        controller: the controllers'; False where a doctor listens there already.
        rendezvous: torchrun's; False where the torchrun above us listens there already.
    """
    wanted: dict[str, int] = {}
    if controller and (job.nodes > 1 or job.port is not None):
        wanted["--tft-controller-port"] = job.controller_port
    if rendezvous and job.nodes > 1:
        wanted["--master-port"] = rendezvous_port(job)
    if job.settings.tft_metrics_port is not None:
        wanted["--tft-metrics-port"] = job.settings.tft_metrics_port
    for flag, port in wanted.items():
        taken = why_taken(port)
        if taken:
            yield red(
                "ports", f"{flag}: port {port} is taken ({taken})", "stop what listens there, or choose another port"
            )
        else:
            yield green("ports", f"{flag}: port {port} is free")
    if not wanted and job.nodes == 1:
        yield green("ports", "a single host opens none")


def why_taken(port: int, address: str = "") -> str:
    """Why a server cannot have this port here; "" if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            return explain_taken(port, error)
    return ""


def explain_taken(port: int, error: OSError) -> str:
    """The reason of a failed bind, with the process that has the port where this user may see it."""
    if error.errno != errno.EADDRINUSE:
        return _words(error)
    try:
        for entry in psutil.net_connections("tcp"):
            if entry.status == psutil.CONN_LISTEN and entry.pid and entry.laddr and entry.laddr.port == port:
                return f"by process {entry.pid}, {psutil.Process(entry.pid).name()}"
    except psutil.Error:
        pass  # of another user
    return f"{_words(error)}, by a process that this user cannot see"


def _words(error: OSError) -> str:
    return str(error.strerror or error).lower()
