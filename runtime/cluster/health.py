"""HealthMonitor: heartbeats to the peers that this process depends on, and the news that one is lost.

A killed process closes its connections, which is seen at the next beat; a hung one or a cut network only by silence. Either
way whoever waits for the peer is told, so that no wait lasts for its whole deadline, and never for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.cluster.client import WorkerClient
from runtime.cluster.proto import control_pb2 as pb
from runtime.deadline import Deadline
from runtime.errors import PeerLostError, VerbflowError
from runtime.future import Future

INTERVAL_S = 1.0
TIMEOUT_S = 10.0
# One refused connection may be a full backlog; two in a row, a quarter of an interval apart, are a process that is gone.
_REFUSALS = 2


@dataclass(eq=False)
class Watch:
    """One watched peer. ``lost`` is set once, and stays."""

    client: WorkerClient
    incarnation: int
    session: int
    on_lost: Callable[[str, PeerLostError], None]
    seen_ns: int = field(default_factory=time.monotonic_ns)
    sent_ns: int = 0
    answers: int = 0
    refusals: int = 0
    pending: bool = False
    lost: PeerLostError | None = None

    @property
    def task(self) -> str:
        return self.client.task

    def age_s(self) -> float:
        """Seconds since the peer was last heard of."""
        return (time.monotonic_ns() - self.seen_ns) * 1e-9


class HealthMonitor:
    """One thread a process beats for all watches. ``on_lost(task, error)`` runs once a watch, on that thread or gRPC's; it
    must not block."""

    def __init__(self, interval_s: float = INTERVAL_S, timeout_s: float = TIMEOUT_S) -> None:
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self._watches: list[Watch] = []
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(
        self, client: WorkerClient, incarnation: int, on_lost: Callable[[str, PeerLostError], None], session: int = 0
    ) -> Watch:
        """Begin to beat. The peer counts as heard of now. A ``session`` renews the lease of its graphs there."""
        watch = Watch(client, incarnation, session, on_lost)
        with self._guard:
            self._watches.append(watch)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="verbflow-health", daemon=True)
                self._thread.start()
        self._wake.set()
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Stop; no news of this watch comes afterwards but one that is just being told. Idempotent."""
        with self._guard:
            if watch in self._watches:
                self._watches.remove(watch)

    def describe(self, task: str) -> str:
        """ "the peer's last heartbeat was 3.2 s ago", or "" for a peer that is not watched."""
        with self._guard:
            ages = [watch.age_s() for watch in self._watches if watch.task == task]
        return f"the peer's last heartbeat was {min(ages):.1f} s ago" if ages else ""

    def close(self) -> None:
        """Stop beating and wait for the thread. Idempotent."""
        self._closed = True
        self._wake.set()
        with self._guard:
            thread, self._thread = self._thread, None
            self._watches.clear()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._closed:
            with self._guard:
                watches = [watch for watch in self._watches if watch.lost is None]
            now = time.monotonic_ns()
            for watch in watches:
                if watch.age_s() > self.timeout_s:
                    self._lose(watch, f"no heartbeat for {watch.age_s():.1f} s")
                    continue
                pause_s = self.interval_s / (4 if watch.refusals else 1)
                if not watch.pending and (now - watch.sent_ns) * 1e-9 >= pause_s:
                    self._beat(watch, now)
            self._wake.wait(self.interval_s / 4)
            self._wake.clear()

    def _beat(self, watch: Watch, now_ns: int) -> None:
        watch.pending, watch.sent_ns = True, now_ns
        answer: Future[pb.PingReply] = watch.client.start(
            "Ping", pb.PingRequest(session=watch.session), Deadline.after(self.timeout_s)
        )
        answer.add_done_callback(lambda done: self._answered(watch, done))

    def _answered(self, watch: Watch, answer: Future[pb.PingReply]) -> None:
        watch.pending = False
        if self._closed:
            return
        try:
            reply = answer.result(Deadline.after(0))
        except PeerLostError as error:
            watch.refusals += 1
            if watch.refusals >= _REFUSALS:
                self._lose(watch, str(error))
            return
        except VerbflowError:
            return  # slow, or closing: silence decides
        watch.refusals = 0
        if reply.incarnation != watch.incarnation:
            self._lose(watch, "it was restarted: its incarnation is another one")
            return
        watch.seen_ns = time.monotonic_ns()
        watch.answers += 1

    def _lose(self, watch: Watch, why: str) -> None:
        with self._guard:
            if watch.lost is not None or watch not in self._watches:
                return
            watch.lost = PeerLostError(
                f"{watch.task} ({watch.client.address}) is lost: {why}; its last heartbeat was {watch.age_s():.1f} s ago"
            )
        watch.on_lost(watch.task, watch.lost)
