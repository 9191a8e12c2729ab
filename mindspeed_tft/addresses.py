"""What an address says about who can reach it. Imports nothing of ours: it is asked with all features off, too."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """True for names and addresses that nothing outside this host can reach; judged without a name server."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
