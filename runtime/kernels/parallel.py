"""A few threads that share one kernel's work.

numpy gives the interpreter lock back while it computes, so two Python threads with one BLAS thread each keep two cores
busy, and unlike BLAS's own threads they also share the copies, pools and element-wise passes around the products.

Helpers are daemon threads, started at first use and kept in a process-wide list. One that had nothing to do for
``IDLE_SECONDS`` ends by itself, so nothing has to be closed; ``close`` ends them all at once and waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any

Call = Callable[[], Any]
IDLE_SECONDS = 1.0
THREAD_NAME = "kernel-helper"


class _Helper:
    """One thread and its two mailboxes. ``ask`` and ``wait`` are called under the crew's lock."""

    def __init__(self, index: int) -> None:
        self._asked: SimpleQueue[Call | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._loop, name=f"{THREAD_NAME}-{index}", daemon=True)
        self.thread.start()

    def ask(self, call: Call | None) -> None:
        self._asked.put(call)

    def wait(self) -> BaseException | None:
        return self._done.get()

    def _loop(self) -> None:
        while True:
            try:
                call = self._asked.get(timeout=IDLE_SECONDS)
            except Empty:
                if _crew.dismiss(self):
                    return
                continue
            if call is None:
                return
            error: BaseException | None = None
            try:
                call()
            except BaseException as raised:  # handed to the caller, who raises it
                error = raised
            self._done.put(error)


class _Crew:
    """The helpers of this process. Only one kernel uses them at a time; a second one does its work alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helpers: list[_Helper] = []

    def run(self, calls: Sequence[Call]) -> None:
        """Run all ``calls`` and return when the last is done; the first error is raised then. The caller runs one."""
        if len(calls) == 1 or not self._lock.acquire(blocking=False):
            for call in calls:
                call()
            return
        try:
            helpers = self._hire(len(calls) - 1)
            for helper, call in zip(helpers, calls[1:]):
                helper.ask(call)
            error: BaseException | None = None
            try:
                calls[0]()
            except BaseException as raised:  # the helpers must be waited for first: they write into the same arrays
                error = raised
            for helper in helpers:
                error = helper.wait() or error
        finally:
            self._lock.release()
        if error is not None:
            raise error

    def _hire(self, count: int) -> list[_Helper]:
        while len(self._helpers) < count:
            self._helpers.append(_Helper(len(self._helpers) + 1))
        return self._helpers[:count]

    def dismiss(self, helper: _Helper) -> bool:
        """Whether an idle helper may end: it is the last of the list, and nobody is about to ask it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # Only the last, so that the others keep their numbers. One closed already is not in the list.
            if self._helpers and self._helpers[-1] is helper:
                self._helpers.pop()
                return True
            return False
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            helpers, self._helpers = self._helpers, []
            for helper in helpers:
                helper.ask(None)
        for helper in helpers:
            helper.thread.join()


_crew = _Crew()


def _reset_after_fork() -> None:
    global _crew
    _crew = _Crew()  # threads do not survive a fork


os.register_at_fork(after_in_child=_reset_after_fork)


def close() -> None:
    """End the helper threads and wait for them. The next kernel that wants some starts them again."""
    _crew.close()


def sequence(calls: Sequence[Call]) -> Call:
    """One call that makes all of ``calls`` in order."""
    if len(calls) == 1:
        return calls[0]
    fixed = tuple(calls)

    def run() -> None:
        for call in fixed:
            call()

    return run


def fixed_shares(shares: Sequence[Sequence[Call]]) -> Call:
    """Share i is done by thread i, in order: what sums are made of, so that they come out alike every time."""
    calls = [sequence(share) for share in shares if share]
    if not calls:
        return sequence(())
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        _crew.run(calls)

    return run


def free_shares(items: Sequence[Sequence[Call]]) -> Call:
    """``items[i][t]`` does item i with thread t's temporary memory; whichever thread is free takes the next item.

    For items whose results do not depend on who made them, in which order. The number of threads is the length of a row.
    """
    threads = min(len(items[0]) if items else 1, len(items))
    if threads <= 1:
        return sequence([row[0] for row in items])
    rows = tuple(tuple(row) for row in items)

    def run() -> None:
        left = iter(rows)  # a list's iterator hands each item out once, whoever asks

        def take(thread: int) -> None:
            for row in left:
                row[thread]()

        _crew.run([partial(take, thread) for thread in range(threads)])

    return run


def split(size: int, parts: int) -> list[tuple[int, int]]:
    """``range(size)`` in at most ``parts`` nearly equal, non-empty pieces [start, stop)."""
    parts = max(1, min(parts, size))
    bounds = [size * part // parts for part in range(parts + 1)]
    return list(pairwise(bounds))
