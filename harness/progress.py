"""Progress: what a person sees while trials run. Nothing is drawn while a trial is being measured."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod

from harness import units


class Progress(ABC):
    """Told by the runner between trials, on its thread."""

    @abstractmethod
    def begin(self, total: int, done: int) -> None:
        """``total`` trials, of which ``done`` were measured before."""

    @abstractmethod
    def trial(self, label: str, status: str, detail: str, wall_ns: int) -> None:
        """A trial ended."""

    @abstractmethod
    def end(self) -> None:
        """No more trials."""


class Silent(Progress):
    """For tests and ``--json``."""

    def begin(self, total: int, done: int) -> None: ...

    def trial(self, label: str, status: str, detail: str, wall_ns: int) -> None: ...

    def end(self) -> None: ...


class Lines(Progress):
    """One line a trial, for logs and for output that is not a terminal."""

    def __init__(self) -> None:
        self._total = self._done = 0

    def begin(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        if done:
            print(f"{done} of {total} trials were measured before", flush=True)

    def trial(self, label: str, status: str, detail: str, wall_ns: int) -> None:
        self._done += 1
        tail = f": {detail}" if detail else ""
        print(f"[{self._done}/{self._total}] {label} {status} {units.format_ns(wall_ns)}{tail}", flush=True)

    def end(self) -> None: ...


class Bar(Progress):
    """A bar with the time left, and a line for every trial that is not ok."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        # Redrawn by hand only: a refreshing thread would take CPU time from what is being measured.
        self._bar = RichProgress(*columns, console=self._console, auto_refresh=False)
        self._task = self._bar.add_task("starting", total=1)

    def begin(self, total: int, done: int) -> None:
        self._bar.update(self._task, total=total, completed=done)
        self._bar.start()
        self._bar.refresh()

    def trial(self, label: str, status: str, detail: str, wall_ns: int) -> None:
        if status != "ok":
            self._console.print(f"{label} {status}: {detail}", markup=False, highlight=False)
        self._bar.update(self._task, advance=1, description=label)
        self._bar.refresh()

    def end(self) -> None:
        self._bar.stop()


def for_stream() -> Progress:
    """A bar on a terminal, lines elsewhere."""
    return Bar() if sys.stderr.isatty() else Lines()
