"""perftest: ib_read_lat, ib_write_lat, ib_send_lat and their _bw siblings between two processes of this host.

Its latencies are half round trips of a spinning pair, so they are a floor, not a fetch; a READ is a whole round trip.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass

import numpy as np

from harness.bench.base import RankContext, parameter
from harness.bench.peers.program import Program
from runtime.errors import TransportError, UnavailableError
from runtime.transport.registry import transport_class

_TOOLS = ("ib_read_lat", "ib_write_lat", "ib_send_lat")


@dataclass(frozen=True)
class PerftestParams:
    transport: str = parameter("perftest", "the name under which rows are drawn", unit="text", choices=("perftest",))
    tool: str = parameter("ib_read_lat", "which of its programs", unit="text", choices=_TOOLS)
    nbytes: int = parameter(4096, "message size", unit="bytes", at_least=2, at_most=1 << 23)


class Perftest(Program):
    name = "perftest"
    summary = "perftest's latency programs (optional)"
    Params = PerftestParams

    def fidelity(self, p: PerftestParams) -> str:
        return str(transport_class("verbs").probe().fidelity)

    def setup(self, ctx: RankContext, p: PerftestParams) -> PerftestParams:
        if shutil.which(p.tool) is None:
            raise UnavailableError(f"{p.tool} is not installed; run: sudo apt-get install -y perftest")
        availability = transport_class("verbs").probe()
        if not availability.ok:
            raise UnavailableError(availability.reason)
        return p

    def command(self, p: PerftestParams, count: int) -> list[str]:
        port = 18515 + hash((time.monotonic_ns(), count)) % 10_000
        return [p.tool, "-s", str(p.nbytes), "-n", str(max(count, 5)), "-U", "-F", "-p", str(port)]

    def iterate(self, ctx: RankContext, state: PerftestParams, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        command = self.command(state, count)
        with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
            try:
                while True:
                    # The server says nothing when it listens; the client is told to try again until then.
                    done = subprocess.run(
                        [*command, ctx.host],
                        capture_output=True,
                        text=True,
                        timeout=ctx.deadline.remaining(),
                        check=False,
                    )
                    if done.returncode == 0:
                        break
                    if server.poll() is not None or ctx.deadline.expired():
                        raise TransportError(f"{state.tool} failed: {done.stderr.strip()[-300:]}")
                    time.sleep(0.1)
            finally:
                server.kill()
        elapsed = self.durations(state, done.stdout)
        starts = np.concatenate([[0], np.cumsum(elapsed)[:-1]]).astype(np.int64)
        return starts, elapsed, np.full(len(elapsed), state.nbytes, np.int64)

    def durations(self, p: PerftestParams, output: str) -> np.ndarray:
        rows = re.findall(r"^\s*\d+, +([0-9.]+)\s*$", output, re.MULTILINE)
        if not rows:
            raise TransportError(f"{p.tool} printed no samples: {output.strip()[-300:]}")
        return np.array([float(value) * 1000 for value in rows], np.int64)
