"""Links: the network interfaces that collectives can be moved to, and whether this host can use one.

A link is named as gloo and NCCL name it: an interface, or several with commas between. "" stands for the one that the
backend chooses by itself at the start (GLOO_SOCKET_IFNAME, or the interface of the host's name). Here one only looks at
the host; who moves what, and when, is decided elsewhere.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

from mindspeed_tft.engine.link import NAME


class LinkUnusable(RuntimeError):
    """This host cannot use a link, and why."""


def interfaces(link: str) -> tuple[str, ...]:
    """The interfaces that a link is made of; none for "".

    Raises:
        LinkUnusable: a name cannot be that of an interface.
    """
    names = tuple(link.split(",")) if link else ()
    for name in names:
        if not NAME.fullmatch(name):
            raise LinkUnusable(f"{name!r} cannot be the name of a network interface")
    return names


def addresses(link: str) -> tuple[str, ...]:
    """The addresses of a link's interfaces on this host, in the order in which they are asked for; none for "".

    Raises:
        LinkUnusable: an interface is not there, is down, or has no address.
    """
    found: list[str] = []
    if names := interfaces(link):
        known, states = psutil.net_if_addrs(), psutil.net_if_stats()
        for name in names:
            if name not in known and name not in states:
                there = ", ".join(sorted(states))
                raise LinkUnusable(f"interface {name} is not on host {socket.gethostname()}, which has {there}")
            if name not in states or not states[name].isup:
                raise LinkUnusable(f"interface {name} of host {socket.gethostname()} is down")
            mine = [plain(entry.address) for entry in known.get(name, ()) if entry.family in _FAMILIES]
            if not mine:
                raise LinkUnusable(f"interface {name} of host {socket.gethostname()} has no address")
            found += mine
    return tuple(found)


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def name_of(address: str) -> str:
    """The interface of this host that has an address; "" if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family in _FAMILIES and plain(entry.address) == address for entry in entries):
            return name
    return ""


def words(link: str) -> str:
    """A link for a person."""
    return f"link {link}" if link else "the default link"


def plain(address: str) -> str:
    """An address without the interface that it is valid on, and IPv4 as IPv4: so that two can be compared."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
