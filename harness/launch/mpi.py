"""MPI launcher: ``mpirun`` as a process starter only; no rank calls MPI.

For clusters where mpirun knows how to reach the nodes. The checkout must be on a file system that all nodes share.
"""

from __future__ import annotations

import shutil

from harness.launch.base import Launcher, RankSpec

_PASSED = ("VERBFLOW_TOKEN", "VERBFLOW_PARENT_DEATH", "PYTHONUNBUFFERED")


class MpiLauncher(Launcher):
    """``hosts`` lists the nodes, rank by rank and then anew; ``flavour`` is openmpi or mpich."""

    name = "mpi"
    spread = True
    options = ("hosts", "flavour", "mpirun_args")

    def available(self) -> str:
        if shutil.which("mpirun") is None:
            return "mpirun is not on PATH; load or install an MPI"
        if not self.settings.get("hosts"):
            return 'the definition names no hosts; write [launcher] hosts = ["node1", "node2"]'
        return ""

    def host(self, rank: int) -> str:
        hosts = self.settings.get("hosts") or ["127.0.0.1"]
        return str(hosts[rank % len(hosts)])

    def command(self, rank: RankSpec) -> list[str]:
        names = [*_PASSED, *rank.environment]
        if self.settings.get("flavour", "openmpi") == "mpich":
            where = ["-hosts", rank.host, "-genvlist", ",".join(dict.fromkeys(names))]
        else:
            where = ["--host", rank.host]
            for name in dict.fromkeys(names):
                where += ["-x", name]  # by name: the token's value stays out of argv
        return ["mpirun", "-np", "1", *where, *self.settings.get("mpirun_args", []), *rank.program()]
