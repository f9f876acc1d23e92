"""Local launcher: every rank a process on this host."""

from __future__ import annotations

from harness.launch.base import Launcher, RankSpec, pinned


class LocalLauncher(Launcher):
    """Ranks talk over loopback, shared memory, or this host's RDMA device."""

    name = "local"
    options = ("cpus", "bind")

    def command(self, rank: RankSpec) -> list[str]:
        return pinned(rank, rank.program())

    def host(self, rank: int) -> str:
        return str(self.settings.get("bind", "127.0.0.1"))
