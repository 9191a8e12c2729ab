"""Several hosts on one machine: network namespaces with addresses of their own, joined by a bridge. Needs root.

    reason = netns.why_not()                      # "" where namespaces can be made; else skip with it
    with netns.Network(2, tmp_path) as network:   # hosts "node0" (10.77.0.1) and "node1" (10.77.0.2)
        host = network[0]
        process = host.start(["tftrun", "--master-addr", host.address, ...], env={...}, stdout=file)
        host.run(["ping", "-c1", network[1].name])
        host.pids()                               # of all processes on it, as this machine numbers them
        host.kill()                               # SIGKILL to all of them: the kernel still closes their connections
        host.power_off()                          # the host is gone: its peers hear nothing any more, not even an end
        host.power_on()                           # an empty host with the same name and address
        network.cut(0); network.heal(0)           # host 0 reaches nobody, and again
        network.split([0], [1, 2]); network.join()    # two sides that do not reach each other, and one network again

    with netns.Network(2, tmp_path, links=2):     # each host also has eth1 (10.78.0.x), on a network of its own
        host.bytes("eth1")                        # received and sent so far, as the kernel counts
        host.run(["ip", "link", "set", "eth1", "down"])
        network.cut(0, link=1)                    # the same as above, on the network of eth1

Each host has its own host name, /etc/hosts (all names resolve), loopback and TMPDIR; the files and the process numbers
are those of the machine. Nothing outside is touched: the bridge has a namespace of its own, and with the last process
all of it is gone, also when the test is killed. Leaving the context kills everything on the hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

SUBNETS = ("10.77.0", "10.78.0")  # of eth0, of eth1
LONGEST = 20.0  # seconds until a namespace stands, or all processes in it are gone


def why_not() -> str:
    """Why hosts cannot be made here; "" if they can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (iproute2, util-linux, hostname)"
    script = "ip link add port0 type veth peer name port1 && ip link add br0 type bridge"
    script += " && mount --bind /etc/hosts /etc/hosts"
    probe = subprocess.run(["unshare", "--net", "--mount", "--uts", "sh", "-c", script], capture_output=True, text=True)
    return f"no network namespaces: {probe.stderr.strip() or probe.returncode}" if probe.returncode else ""


class _Namespace:
    """A network, mount and name space, held by a process that ends when we do."""

    def __init__(self, set_up: str) -> None:
        """`set_up`: shell commands inside it, before anybody else is let in."""
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", f"set -e; {set_up}; echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            self.close()
            raise RuntimeError(f"a network namespace did not come up: {set_up}")
        self.pid = self._holder.pid
        self._network = _network_of(self.pid)

    def enter(self, command: Sequence[str | Path]) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--", *map(str, command)]

    def call(self, command: str) -> None:
        subprocess.run(self.enter(command.split()), check=True, timeout=LONGEST)

    def pids(self) -> list[int]:
        """Of all living processes inside, but for the one that holds it."""
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in numbers if pid != self.pid and _network_of(pid) == self._network and not _zombie(pid)]

    def close(self) -> None:
        for stream in (self._holder.stdin, self._holder.stdout):
            assert stream is not None
            stream.close()
        self._holder.kill()
        self._holder.wait()


class Host:
    """One host of a `Network`."""

    def __init__(self, network: Network, index: int) -> None:
        self.index, self.name = index, f"node{index}"
        self.addresses = tuple(f"{SUBNETS[link]}.{index + 1}" for link in range(network.links))
        self.address = self.addresses[0]
        self._network = network
        self._space: _Namespace | None = None
        self._children: list[subprocess.Popen[Any]] = []
        self.power_on()

    @property
    def on(self) -> bool:
        return self._space is not None

    def start(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on this host. `env` is added to the environment; `options`: as of `subprocess.Popen`."""
        options = {"start_new_session": True, **options}
        merged = {**os.environ, "TMPDIR": str(self._temporary), **(env or {})}
        process = subprocess.Popen(self._running().enter(command), env=merged, **options)
        self._children.append(process)
        return process

    def words(self, *command: str) -> tuple[str, ...]:
        """A command line that runs this command here, for who starts it himself."""
        return tuple(self._running().enter(command))

    def run(self, command: Sequence[str | Path], timeout: float = LONGEST) -> str:
        """Run a command on this host to its end; returns its output. CalledProcessError if it fails."""
        done = subprocess.run(
            self._running().enter(command), check=True, timeout=timeout, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    def bytes(self, interface: str) -> int:
        """Received and sent by an interface since the host is on."""
        (line,) = (line for line in self.run(["cat", "/proc/net/dev"]).splitlines() if f" {interface}:" in f" {line}")
        numbers = line.partition(":")[2].split()
        return int(numbers[0]) + int(numbers[8])

    def pids(self) -> list[int]:
        return self._space.pids() if self._space is not None else []

    def kill(self) -> list[int]:
        """Kill all processes of this host; returns their pids."""
        killed: set[int] = set()
        end = time.monotonic() + LONGEST
        while found := self.pids():  # again, because one may have started another meanwhile
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(found)
            if time.monotonic() > end:
                raise RuntimeError(f"processes on {self.name} survive SIGKILL: {found}")
            time.sleep(0.005)
        for child in self._children:
            child.wait()
        self._children.clear()
        return sorted(killed)

    def power_off(self) -> list[int]:
        """The host is gone without a word to anybody. Returns the pids of its processes, which are dead."""
        space = self._running()
        self._network.unplug(self.index)
        killed = self.kill()
        space.close()  # with the kernel's half-open connections, which would tell the peers of their end later
        self._space = None
        return killed

    def power_on(self) -> None:
        """A new host with the name and the address of this one."""
        assert self._space is None, f"{self.name} is on"
        self._temporary = self._network.folder / f"tmp{self.index}"
        self._temporary.mkdir(exist_ok=True)
        hosts = self._network.hosts_file
        self._space = _Namespace(f"hostname {self.name}; mount --bind {hosts} /etc/hosts; ip link set lo up")
        for link, address in enumerate(self.addresses):
            self._network.plug(self.index, self._space.pid, link)
            self._space.call(f"ip link set eth{link} up")
            self._space.call(f"ip address add {address}/24 dev eth{link}")

    def _running(self) -> _Namespace:
        assert self._space is not None, f"{self.name} is off"
        return self._space


class Network:
    """`count` hosts, each of which reaches all others, on each of its `links`."""

    def __init__(self, count: int, folder: Path, links: int = 1) -> None:
        """`folder`: for /etc/hosts and the hosts' temporary directories; a short path, for Unix sockets."""
        self.folder, self.links = folder, links
        self.hosts_file = folder / "hosts"
        lines = [f"{SUBNETS[0]}.{index + 1} node{index}\n" for index in range(count)]
        self.hosts_file.write_text("127.0.0.1 localhost\n" + "".join(lines))
        self._stack = contextlib.ExitStack()
        self._sides = 1
        bridges = [f"ip link add {name} type bridge; ip link set {name} up" for name in map(_bridge, range(links))]
        self._switch = _Namespace("; ".join(bridges))
        self._stack.callback(self._switch.close)
        self.hosts: list[Host] = []
        try:
            for index in range(count):
                self.hosts.append(Host(self, index))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def cut(self, index: int, link: int = 0) -> None:
        """Host `index` reaches nobody, and nobody hears of it: packets are lost, interfaces stay up."""
        self._switch.call(f"ip link set {_port(index, link)} nomaster")

    def heal(self, index: int, link: int = 0) -> None:
        """Host `index` is back on the network."""
        self._switch.call(f"ip link set {_port(index, link)} master {_bridge(link)}")

    def split(self, *sides: Iterable[int]) -> None:
        """Hosts of different sides do not reach each other."""
        for number, side in enumerate(sides):
            if number >= self._sides:
                self._switch.call(f"ip link add br{number} type bridge")
                self._switch.call(f"ip link set br{number} up")
                self._sides += 1
            for index in side:
                self._switch.call(f"ip link set port{index} master br{number}")

    def join(self) -> None:
        """All hosts reach each other."""
        for host in self.hosts:
            if host.on:
                self.heal(host.index)

    def plug(self, index: int, holder: int, link: int) -> None:
        """A cable from a bridge to an interface of a namespace; its hardware address stays, as others remember it."""
        port, address = _port(index, link), f"02:00:00:00:{link:02x}:{index + 1:02x}"
        self._switch.call(f"ip link add {port} type veth peer name eth{link} address {address} netns {holder}")
        self._switch.call(f"ip link set {port} master {_bridge(link)} up")

    def unplug(self, index: int) -> None:
        for link in range(self.links):
            self._switch.call(f"ip link delete {_port(index, link)}")

    def close(self) -> None:
        """Kill all that runs on the hosts, and remove them."""
        for host in self.hosts:
            if host.on:
                host.power_off()
        self.hosts.clear()
        self._stack.close()


def _bridge(link: int) -> str:
    return "br0" if link == 0 else f"link{link}"


def _port(index: int, link: int) -> str:
    return f"port{index}" if link == 0 else f"port{index}.{link}"


def _network_of(pid: int) -> int:
    """The network namespace of a process; 0 when the process is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
