"""A peer as a program: another system's measurement in a process of its own, whose raw durations become our samples.

The program prints one JSON list of nanoseconds as its last line. It runs in the environment that `make peers` makes, or in
the one whose interpreter VERBFLOW_PEER_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import abstractmethod
from typing import Any

import numpy as np

from harness.bench.base import Benchmark, RankContext
from harness.cell import ROOT
from runtime.errors import TransportError, UnavailableError


def peer_python() -> str:
    """The interpreter that peers run in."""
    beside = ROOT / ".venv-peers" / "bin" / "python"
    return os.environ.get("VERBFLOW_PEER_PYTHON") or (str(beside) if beside.exists() else sys.executable)


def require_module(module: str, install: str) -> None:
    """UnavailableError, with the command that would change it, unless the peers' interpreter has ``module``."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([peer_python(), "-c", code], timeout=60, check=False).returncode:
        raise UnavailableError(
            f"peer package {module} is not installed; run: make peers, or {peer_python()} -m pip install {install}"
        )


class Program(Benchmark):
    """A benchmark that is one run of a program for all iterations; the program verifies what it can by itself."""

    def ranks(self, p: Any) -> int:
        return 1

    @abstractmethod
    def command(self, p: Any, count: int) -> list[str]:
        """The program for ``count`` iterations."""

    def durations(self, p: Any, output: str) -> np.ndarray:
        """Nanoseconds of each iteration, from what the program printed."""
        return np.array(json.loads(output.strip().splitlines()[-1]), np.int64)

    def setup(self, ctx: RankContext, p: Any) -> Any:
        return p

    def verify(self, ctx: RankContext, state: Any) -> None:
        """Every run of the program checks what it received; a run more would only cost its start."""

    def once(self, ctx: RankContext, state: Any) -> int:
        raise NotImplementedError("a program runs all iterations at once")

    def iterate(self, ctx: RankContext, state: Any, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        command = self.command(state, count)
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=ctx.deadline.remaining(), check=False
            )
        except subprocess.TimeoutExpired as error:
            raise TransportError(f"peer {self.name} did not end in time") from error
        if done.returncode:
            raise TransportError(f"peer {self.name} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        elapsed = self.durations(state, done.stdout)
        starts = np.concatenate([[0], np.cumsum(elapsed)[:-1]]).astype(np.int64)
        return starts, elapsed, np.full(len(elapsed), self.bytes_per_iteration(state), np.int64)

    def fidelity(self, p: Any) -> str:
        return "loopback"
