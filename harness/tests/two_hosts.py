"""What two machines joined by a wire do in turn; each runs ``python -m harness.tests.two_hosts`` (see test_two_hosts.py).

Node 0 serves tensors over verbs, node 1 fetches and checks them, while node 0 disturbs its end of the wire with netem. At
last node 0 takes its interface down in the middle of a transfer, and node 1 must be told, by name and in time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import DeadlineError, PeerLostError
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec
from runtime.testing import Guarded, Shelf, pattern_tensor
from runtime.transport.base import Options
from runtime.transport.registry import open_transport

MIB = 1 << 20
PORT = 4711
SERVER = "10.77.0.1"
SIZES = (8, 4096, 65_537, 3 * MIB + 1)
CONDITIONS = {
    "quiet": "",
    "loss 1 %": "loss 1%",
    "delay": "delay 2ms limit 20000",
    # An RC queue pair takes a packet that overtook another for a loss and starts over; soft-RoCE bears a few in a hundred.
    "reordering": "delay 0.3ms reorder 2% limit 20000",
}
LARGE = 32 * MIB
PATIENCE_S = 120.0
LINK_DOWN_S = 40.0


def spec(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), np.dtype(np.uint8))


class Wire:
    """Node 0's end of the cable."""

    def __init__(self) -> None:
        self._interface = os.environ["VERBFLOW_INTERFACE"]

    def disturb(self, netem: str) -> None:
        """Replace what netem does; an empty string: nothing."""
        subprocess.run(["tc", "qdisc", "del", "dev", self._interface, "root"], stderr=subprocess.DEVNULL)
        if netem:
            subprocess.run(["tc", "qdisc", "add", "dev", self._interface, "root", "netem", *netem.split()], check=True)

    def cut(self) -> None:
        """Take the interface down."""
        subprocess.run(["ip", "link", "set", self._interface, "down"], check=True)


class Line:
    """Messages of one line of JSON over the wire's TCP."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self._file = connection.makefile("rw")

    def send(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def receive(self) -> Any:
        line = self._file.readline()
        if not line:
            raise ConnectionError("the other node hung up")
        return json.loads(line)


def serve() -> None:
    """Node 0: serve, and do to the wire what node 1 asks for."""
    wire = Wire()
    shelf = Shelf()
    arena = Arena(64 * MIB)
    for nbytes in (*SIZES, LARGE):
        shelf.put(f"bytes {nbytes}", pattern_tensor(spec(nbytes), nbytes, arena))
    transport = open_transport("verbs", Options(token="t", bind=SERVER, task="/job:test/task:0"), arena)
    with socket.create_server((SERVER, PORT)) as server:
        connection, _ = server.accept()
        line = Line(connection)
        line.send(transport.listen(shelf).decode())
        while True:
            request = line.receive()
            if request == "cut":
                line.send("soon")
                time.sleep(0.15)  # into the transfer that node 1 has begun
                wire.cut()
                break
            wire.disturb(request)
            print(f"the wire has: {request or 'nothing'}", flush=True)
            line.send("done")
    time.sleep(LINK_DOWN_S + 5)  # a peer that lives, but is not reached
    transport.close()
    arena.close()


def fetch() -> None:
    """Node 1: fetch under every condition and check every byte."""
    line = Line(_dial())
    arena = Arena(96 * MIB)
    transport = open_transport(
        "verbs", Options(token="t", bind=os.environ["VERBFLOW_ADDRESS"], task="/job:test/task:1"), arena
    )
    address = line.receive().encode()
    assert transport.reaches(address)
    channel = transport.connect(address, peer="/job:test/task:0", deadline=Deadline.after(PATIENCE_S))
    for label, netem in CONDITIONS.items():
        line.send(netem)
        line.receive()
        started = time.monotonic()
        for at, nbytes in enumerate(SIZES):
            guarded = Guarded(spec(nbytes), arena if at % 2 else None)
            deadline = Deadline.after(PATIENCE_S)
            channel.fetch(f"bytes {nbytes}", guarded.array, deadline=deadline).result(deadline)
            assert np.array_equal(guarded.array, pattern_tensor(spec(nbytes), nbytes)), (label, nbytes)
            assert guarded.intact(), (label, nbytes)
        print(f"{label}: content verified after {time.monotonic() - started:.1f} s", flush=True)

    line.send("")
    line.receive()
    line.send("cut")
    line.receive()
    into = arena.tensor(spec(LARGE))
    deadline = Deadline.after(LINK_DOWN_S)
    error: BaseException | None = None
    while error is None:
        error = channel.fetch(f"bytes {LARGE}", into, deadline=deadline).exception(deadline)
    # Keepalive tells after some 15 s that the machine is gone; on a starved host the deadline may come first.
    assert isinstance(error, PeerLostError | DeadlineError), repr(error)
    assert "/job:test/task:0" in str(error)
    print(f"link down: {type(error).__name__} after {deadline.elapsed():.1f} s: {error}", flush=True)
    transport.close()
    arena.close()


def _dial() -> socket.socket:
    deadline = Deadline.after(PATIENCE_S)
    while True:
        try:
            return socket.create_connection((SERVER, PORT), timeout=5)
        except OSError:
            deadline.check("connecting to node 0")
            time.sleep(0.3)


if __name__ == "__main__":
    serve() if os.environ["VERBFLOW_NODE"] == "0" else fetch()
    sys.exit(0)
