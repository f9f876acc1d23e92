"""Netns launcher: every rank in a network namespace of its own, joined by a bridge whose links are shaped by tc.

A cluster with a 1 Gb/s network on one machine: processes and protocol stack are real, only the wire is made slow. The bridge has
a namespace of its own, so nothing of the host's network is touched. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from harness import units
from harness.launch.base import Launcher, RankSpec, pinned

_NETWORK = "10.99.0."


class NetnsLauncher(Launcher):
    """``rate`` ("1Gbit/s") and ``delay`` ("50us", one way) shape every rank's link in both directions; ``mtu`` in bytes."""

    name = "netns"
    fidelity = "shaped"
    options = ("rate", "delay", "mtu", "cpus")

    def __init__(self, options: dict | None = None) -> None:
        super().__init__(options)
        self._prefix = f"vf{os.getpid()}"
        self._ranks = 0

    def available(self) -> str:
        if os.geteuid() != 0:
            return "network namespaces need root; run this experiment with sudo"
        if shutil.which("ip") is None or shutil.which("tc") is None:
            return "ip or tc is missing: sudo apt-get install -y iproute2"
        return ""

    def host(self, rank: int) -> str:
        return f"{_NETWORK}{rank + 1}"

    def namespace(self, rank: int) -> str:
        return f"{self._prefix}r{rank}"

    def command(self, rank: RankSpec) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(rank.rank), *pinned(rank, rank.program())]

    def open(self, size: int) -> None:
        for command in self.bring_up(size):
            self._run(command)
        self._ranks = max(self._ranks, size)

    def close(self) -> None:
        for command in self.take_down():
            subprocess.run(command, capture_output=True, timeout=30, check=False)
        self._ranks = 0

    def bring_up(self, size: int) -> list[list[str]]:
        """The commands that add the namespaces which are not there yet. Pure."""
        bridge = f"{self._prefix}b"
        commands: list[list[str]] = []
        if self._ranks == 0:
            commands += [
                ["ip", "netns", "add", bridge],
                ["ip", "-n", bridge, "link", "add", "br0", "type", "bridge"],
                ["ip", "-n", bridge, "link", "set", "br0", "up"],
            ]
        for rank in range(self._ranks, size):
            name, inner = self.namespace(rank), f"r{rank}"
            mtu = str(self.settings.get("mtu", 1500))
            commands += [
                ["ip", "netns", "add", name],
                ["ip", "-n", bridge, "link", "add", inner, "mtu", mtu, "type", "veth",
                 "peer", "name", "eth0", "mtu", mtu, "netns", name],
                ["ip", "-n", bridge, "link", "set", inner, "master", "br0", "up"],
                ["ip", "-n", name, "addr", "add", f"{self.host(rank)}/24", "dev", "eth0"],
                ["ip", "-n", name, "link", "set", "lo", "up"],
                ["ip", "-n", name, "link", "set", "eth0", "up"],
            ]  # fmt: skip
            # Outgoing traffic of both ends: the rank's sends, and what the bridge sends to it.
            for space, device in ((name, "eth0"), (bridge, inner)):
                commands += self._shape(space, device)
        return commands

    def take_down(self) -> list[list[str]]:
        """The commands that delete every namespace, and with them links and bridge. Pure."""
        names = [self.namespace(rank) for rank in range(self._ranks)]
        return [["ip", "netns", "delete", name] for name in [*names, f"{self._prefix}b"]] if self._ranks else []

    def _shape(self, space: str, device: str) -> list[list[str]]:
        commands = []
        parent = ["root", "handle", "1:"]
        if "rate" in self.settings:
            bits = units.parse_rate(self.settings["rate"])
            # A bucket of 1 ms at the rate (at least four packets of 64 KiB), and a queue of 50 ms, as a switch port has.
            burst = max(bits // 8000, 4 * 65536)
            commands.append(
                ["tc", "-n", space, "qdisc", "add", "dev", device, *parent, "tbf",
                 "rate", f"{bits}bit", "burst", str(burst), "limit", str(burst + bits // 160)]
            )  # fmt: skip
            parent = ["parent", "1:1", "handle", "2:"]
        if "delay" in self.settings:
            delay_us = units.parse_duration(self.settings["delay"]) // 1000
            commands.append(
                ["tc", "-n", space, "qdisc", "add", "dev", device, *parent, "netem",
                 "delay", f"{delay_us}us", "limit", "100000"]
            )  # fmt: skip
        return commands

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            self._ranks = max(self._ranks, 1)
            self.close()
            raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
