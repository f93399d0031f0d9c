"""Machines with routers in between, as namespaces of this kernel. Needs root, ip and iptables.

Addresses are ones that libp2p takes for public, and nothing leaves these namespaces. Each home has a router, whose kind
says what it does with a port that a machine behind it sends from, and with what comes for that port:

* full: anybody may send to it.
* restricted: those hosts may that the machine has sent to, from any port of theirs.
* port_restricted: those ports may that it has sent to. So are most routers.
* symmetric: as that, and each connection gets another port, by chance.
* double: a port_restricted one behind another.
* no_udp: port_restricted, and UDP does not get out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from programs import Processes

CAN_MAKE_NETWORKS = os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("iptables"))
KINDS = ("full", "restricted", "port_restricted", "symmetric", "double", "no_udp")
# Several tests may run at once.
PREFIX = f"swarm-test-{os.getpid()}-"
STREET = f"{PREFIX}internet"
UPNP_CHAINS = """
table inet filter {
    chain forward { type filter hook forward priority 0; policy accept; jump miniupnpd; }
    chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
    chain postrouting { type nat hook postrouting priority 100; jump postrouting_miniupnpd; }
    chain miniupnpd { }
    chain prerouting_miniupnpd { }
    chain postrouting_miniupnpd { }
}
"""
UPNP_CONFIG = """
ext_ifname=out
listening_ip=in
enable_natpmp=yes
enable_upnp=yes
secure_mode=yes
uuid=7b9f1c3e-1111-4222-8333-944444444444
allow 1024-65535 0.0.0.0/0 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""


def ip(*arguments: str) -> str:
    """Run `ip`."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _delete(name: str) -> None:
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


class Internet:
    """A network of public machines, and of homes with a router each.

    Attributes:
        ips: the address of each machine, by name
    """

    def __init__(self) -> None:
        self.ips: dict[str, str] = {}
        self._made: list[str] = []
        self._num_public = 0
        self._add(STREET)
        ip("-n", STREET, "link", "add", "street", "type", "bridge")
        ip("-n", STREET, "link", "set", "street", "up")

    def close(self) -> None:
        """Take it all down."""
        for name in self._made:
            _delete(name)

    def add_public(self, name: str) -> str:
        """A machine with a public address; returns that."""
        self._add(PREFIX + name)
        self._num_public += 1
        self.ips[name] = f"11.0.0.{self._num_public}"
        wire = f"street{self._num_public}"
        ip("-n", PREFIX + name, "link", "add", "out", "type", "veth", "peer", "name", wire, "netns", STREET)
        ip("-n", STREET, "link", "set", wire, "master", "street", "up")
        ip("-n", PREFIX + name, "address", "add", f"{self.ips[name]}/24", "dev", "out")
        ip("-n", PREFIX + name, "link", "set", "out", "up")
        return self.ips[name]

    def give_ip6(self, name: str, *, alone: bool = False) -> str:
        """Give a public machine an address of IPv6, too, or instead of its other one; returns that."""
        number = self.ips[name].rpartition(".")[2]
        ip("-n", PREFIX + name, "address", "add", f"2a00:db8::{number}/64", "dev", "out", "nodad")
        if alone:
            ip("-n", PREFIX + name, "address", "delete", f"{self.ips.pop(name)}/24", "dev", "out")
        return f"2a00:db8::{number}"

    def add_home(self, name: str, kind: str) -> str:
        """A machine behind a router of its own; returns the router's public address."""
        router = f"router-{name}"
        public = self.add_public(router)
        network = self._num_public
        if kind == "double":
            self._connect(router, f"middle-{name}", f"100.64.{network}")
            self._route(router, "port_restricted", f"100.64.{network}.2")
            router = f"middle-{name}"
        self._connect(router, name, f"192.168.{network}")
        self._route(router, "port_restricted" if kind == "double" else kind, f"192.168.{network}.2")
        return public

    def start_upnp(self, name: str, processes: Processes, folder: Path) -> None:
        """Have a home's router forward ports for those behind it that ask by UPnP or NAT-PMP, as miniupnpd does it."""
        router = f"router-{name}"
        chains = folder / f"{router}.nft"
        chains.write_text(UPNP_CHAINS)
        self.run(router, "nft", "-f", str(chains))
        config = folder / f"{router}.conf"
        config.write_text(UPNP_CONFIG)
        with processes.path(f"upnp-{name}").open("w") as log:
            command = ("miniupnpd", "-d", "-f", str(config), "-P", str(folder / f"{router}.pid"))
            processes.running.append(
                subprocess.Popen(["ip", "netns", "exec", PREFIX + router, *command], stdout=log, stderr=log)
            )

    def sent_bytes(self, machine: str) -> int:
        """Bytes that a machine has sent to the internet so far."""
        return int(self.run(machine, "cat", "/sys/class/net/out/statistics/tx_bytes"))

    def run(self, machine: str, *command: str) -> str:
        """Run a command on a machine."""
        return ip("netns", "exec", PREFIX + machine, *command)

    def iptables(self, machine: str, *arguments: str) -> None:
        """Add rules to a machine."""
        self.run(machine, "iptables", "-w", *arguments)

    def _add(self, namespace: str) -> None:
        _delete(namespace)
        ip("netns", "add", namespace)
        self._made.append(namespace)
        ip("-n", namespace, "link", "set", "lo", "up")

    def _connect(self, router: str, name: str, network: str) -> None:
        """Give a router a machine behind it: .1 is the router's, .2 the machine's."""
        self._add(PREFIX + name)
        self.ips[name] = f"{network}.2"
        ip("-n", PREFIX + name, "link", "add", "out", "type", "veth", "peer", "name", "in", "netns", PREFIX + router)
        ip("-n", PREFIX + name, "address", "add", f"{network}.2/24", "dev", "out")
        ip("-n", PREFIX + router, "address", "add", f"{network}.1/24", "dev", "in")
        ip("-n", PREFIX + name, "link", "set", "out", "up")
        ip("-n", PREFIX + router, "link", "set", "in", "up")
        ip("-n", PREFIX + name, "route", "add", "default", "via", f"{network}.1")
        self.run(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")

    def _route(self, router: str, kind: str, home: str) -> None:
        """Have a router translate addresses; what it has not asked for is dropped, as routers do."""
        random = ["--random"] if kind == "symmetric" else []
        self.iptables(router, "-t", "nat", "-A", "POSTROUTING", "-o", "out", "-j", "MASQUERADE", *random)
        known = ["-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED"]
        self.iptables(router, "-A", "INPUT", "-i", "out", *known, "-j", "ACCEPT")
        self.iptables(router, "-A", "INPUT", "-i", "out", "-j", "DROP")
        to_home = ["-j", "DNAT", "--to", home]
        for protocol in ("tcp", "udp"):
            inwards = ["-t", "nat", "-A", "PREROUTING", "-i", "out", "-p", protocol]
            if kind == "full":
                self.iptables(router, *inwards, *to_home)
            elif kind == "restricted":
                sent = ["-m", "recent", "--name", "sent"]
                self.iptables(router, "-A", "FORWARD", "-i", "in", "-p", protocol, *sent, "--rdest", "--set")
                self.iptables(router, *inwards, *sent, "--rsource", "--rcheck", *to_home)
        if kind == "no_udp":
            self.iptables(router, "-A", "FORWARD", "-p", "udp", "-j", "DROP")


@contextmanager
def internet() -> Iterator[Internet]:
    """A network, for the duration of the context."""
    network = Internet()
    try:
        yield network
    finally:
        network.close()


class Machines:
    """Programs on the machines of a network; each machine has its own user's files."""

    def __init__(self, folder: Path, processes: Processes):
        self._folder = folder
        self._processes = processes

    def start(self, machine: str, name: str, module: str, *options: str) -> subprocess.Popen[bytes]:
        """Start one of our programs, or a file of Python; its output is the log of this name."""
        program = [module] if module.endswith(".py") else ["-m", module]
        state = self._folder / f"state-{machine}"
        # The fork server is in no namespace: these programs are started anew.
        with self._processes.path(name).open("w") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", PREFIX + machine, sys.executable, *program, *options],
                stdout=log,
                stderr=log,
                env=os.environ | {"XDG_STATE_HOME": str(state)},
            )
        self._processes.running.append(process)
        return process


def peer_options(invite: str, stage: int | str, *more: str) -> Sequence[str]:
    """Options of a peer that shares its cores with others."""
    return ("--initial-peers", invite, "--threads", "1", "--device", "cpu", "--stage", str(stage), *more)
