"""Report: what a replica measured, as one numpy archive that needs no pickle to be read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import ConfigError
from runtime.trace import SPAN_DTYPE


@dataclass
class Report:
    """Times are of ``time.monotonic_ns`` in the replica's process. Arrays have one entry a measured step.

    ``facts``: task, model, batch, parameters, transports of each pair and why, thread settings, memory. ``counters``: what the
    measured steps added, by task and then by "transport.counter". ``spans`` and their names: of this replica's
    process, if tracing was asked for.
    """

    step_start_ns: np.ndarray
    step_ns: np.ndarray
    loss: np.ndarray
    global_step: np.ndarray
    facts: dict[str, Any]
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    spans: np.ndarray = field(default_factory=lambda: np.zeros(0, SPAN_DTYPE))
    span_names: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """The last line that a replica prints."""
        return {
            "done": True,
            "task": self.facts["task"],
            "steps": len(self.step_ns),
            "median_step_ns": int(np.median(self.step_ns)) if len(self.step_ns) else 0,
            "loss": float(self.loss[-1]) if len(self.loss) else None,
            "global_step": int(self.global_step[-1]) if len(self.global_step) else 0,
            "recoveries": self.facts["recoveries"],
        }


def write_report(path: Path, report: Report) -> None:
    """Write atomically; ConfigError if the file cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            np.savez(
                file,
                step_start_ns=report.step_start_ns,
                step_ns=report.step_ns,
                loss=report.loss,
                global_step=report.global_step,
                spans=report.spans,
                meta=np.array(
                    json.dumps({"facts": report.facts, "counters": report.counters, "span_names": report.span_names})
                ),
            )
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"report {path} cannot be written: {error.strerror}") from error


def read_report(path: Path) -> Report:
    """The report in a file; ConfigError if it is none."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            meta = json.loads(str(archive["meta"]))
            return Report(
                archive["step_start_ns"],
                archive["step_ns"],
                archive["loss"],
                archive["global_step"],
                meta["facts"],
                meta["counters"],
                archive["spans"],
                meta["span_names"],
            )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no report of a replica: {error}") from error
