"""Slurm launcher: one ``srun`` step a rank inside an allocation, ranks round-robin over its nodes.

The checkout and its results folder must be on a file system that all nodes share.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

from harness.launch.base import Launcher, RankSpec


class SlurmLauncher(Launcher):
    """Inside ``salloc`` or ``sbatch``. ``hosts`` overrides the addresses that ranks bind to (an IPoIB name, for example)."""

    name = "slurm"
    spread = True
    options = ("hosts", "srun_args")

    def available(self) -> str:
        if shutil.which("srun") is None:
            return "srun is not on PATH; run on a Slurm login or compute node"
        if "SLURM_JOB_ID" not in os.environ:
            return "there is no Slurm allocation; run inside `salloc --nodes=2` or an sbatch script"
        return ""

    def host(self, rank: int) -> str:
        hosts = self.settings.get("hosts") or self._nodes()
        return str(hosts[rank % len(hosts)])

    def command(self, rank: RankSpec) -> list[str]:
        nodes = self._nodes()
        return [
            "srun",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={nodes[rank.rank % len(nodes)]}",
            "--overlap",
            "--kill-on-bad-exit=1",
            "--export=ALL",
            "--quiet",
            *self.settings.get("srun_args", []),
            *rank.program(),
        ]

    @functools.cache  # noqa: B019  one launcher lives as long as the run
    def _nodes(self) -> tuple[str, ...]:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return tuple(listed.stdout.split())
