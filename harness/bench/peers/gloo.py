"""gloo: torch.distributed's send and recv between two processes; one iteration is a one-byte request and the tensor back."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass

from harness.bench.base import RankContext, parameter
from harness.bench.peers.program import Program, peer_python, require_module


@dataclass(frozen=True)
class GlooParams:
    transport: str = parameter("gloo", "the name under which rows are drawn", unit="text", choices=("gloo",))
    nbytes: int = parameter(4096, "tensor size", unit="bytes", at_least=1, at_most=1 << 32)


class GlooSend(Program):
    name = "gloo"
    summary = "torch gloo send and recv (optional)"
    Params = GlooParams

    def setup(self, ctx: RankContext, p: GlooParams) -> GlooParams:
        require_module("torch", "torch==2.13.0")
        return p

    def command(self, p: GlooParams, count: int) -> list[str]:
        return [peer_python(), "-m", "harness.bench.peers.gloo", str(p.nbytes), str(count)]


def exchange(rank: int, store: str, nbytes: int, count: int, results: str) -> None:
    """One of the two processes; rank 0 writes its durations to ``results``."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    request = torch.zeros(1, dtype=torch.uint8)
    tensor = torch.full((nbytes,), rank, dtype=torch.uint8)
    elapsed = []
    for _ in range(count + 2):
        start = time.monotonic_ns()
        if rank == 0:
            dist.send(request, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(request, 0)
            dist.send(tensor, 0)
        elapsed.append(time.monotonic_ns() - start)
    if rank == 0:
        assert bool((tensor == 1).all()), "gloo delivered other bytes"
        with open(results, "w") as stream:
            json.dump(elapsed[2:], stream)
    dist.destroy_process_group()


def main() -> None:
    """``gloo.py NBYTES COUNT``: start both processes and print rank 0's durations."""
    import multiprocessing

    nbytes, count = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="verbflow-gloo-") as folder:
        context = multiprocessing.get_context("spawn")
        arguments = (f"{folder}/store", nbytes, count, f"{folder}/results")
        ranks = [context.Process(target=exchange, args=(rank, *arguments)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            sys.exit("a gloo rank failed")
        with open(f"{folder}/results") as stream:
            print(stream.read())


if __name__ == "__main__":
    main()
