"""LeakWatch: what a test, or ten thousand connections, left behind in this process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path

from runtime.deadline import Deadline


class LeakWatch:
    """Threads, child processes, descriptors and names in /dev/shm that are here now and were not when this was made.

    gRPC's core opens a few descriptors with the first channel or server of a process and keeps them (the epoll and eventfd
    of its pollers), so whoever watches uses gRPC once before. It has threads too, but none that Python sees.
    """

    def __init__(self) -> None:
        self._before = self._look()

    def leaks(self, patience: float = 20.0) -> list[str]:
        """What leaked; things that are just going have ``patience`` seconds for it."""
        deadline = Deadline.after(patience)
        while True:
            now = self._look()
            found = [f"{kind}: {name}" for kind in now for name in now[kind] if name not in self._before[kind]]
            if not found or deadline.expired():
                return found
            gc.collect()
            time.sleep(0.01)

    def _look(self) -> dict[str, set[str]]:
        threads = {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}
        children = set()
        for listing in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children |= set(listing.read_text().split())
        descriptors = set()
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{entry}")
                if not target.startswith(f"/proc/{os.getpid()}/fd"):
                    descriptors.add(f"{entry} -> {target}")
        return {
            "thread": threads,
            "child process": children,
            "descriptor": descriptors,
            "shared memory": set(os.listdir("/dev/shm")),
        }
