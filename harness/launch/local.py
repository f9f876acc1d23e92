"""Local launcher: every rank a process on this host."""

from __future__ import annotations

import os

from harness.launch.base import Launcher, RankSpec, pinned


class LocalLauncher(Launcher):
    """Ranks talk over loopback, shared memory, or this host's RDMA device."""

    name = "local"
    options = ("cpus", "bind")

    def command(self, rank: RankSpec) -> list[str]:
        return pinned(rank, rank.program())

    def host(self, rank: int) -> str:
        # The guest names the address of its RDMA device: RDMA and TCP are measured between the same addresses.
        return str(self.settings.get("bind") or os.environ.get("VERBFLOW_ADDRESS") or "127.0.0.1")
