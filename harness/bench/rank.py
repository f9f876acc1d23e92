"""One rank of a trial: ``python -m harness.bench.rank FOLDER RANK``.

FOLDER holds ``job.json`` (cell, size, hosts) and receives ``rank-RANK.npz``. The run's token comes in VERBFLOW_TOKEN, never
in argv. Where there is no common folder, FOLDER is ``-``: one line on standard input holds job and token, and the record is the
last line of standard output, after ``RECORD_MARK``.

Exit codes: 0 measured, 3 failed, 4 cannot run here (skipped); the record says why in each case.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from harness.bench.base import RankContext, benchmark, measure_rank
from harness.bench.group import Group
from harness.cell import Cell
from harness.records import RankRecord, write_rank
from runtime.deadline import Deadline
from runtime.errors import UnavailableError
from runtime.memory import memcpy

RECORD_MARK = "verbflow-record:"
EXIT_FAILED = 3
EXIT_SKIPPED = 4
_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    """Run one rank and store its record; the answer is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.bench.rank", description="One rank of a trial.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("rank", type=int)
    arguments = parser.parse_args(argv)
    if str(arguments.folder) == "-":
        return _run_from_stdin(arguments.rank)
    return run_rank(arguments.folder, arguments.rank)


def _run_from_stdin(rank: int) -> int:
    line = json.loads(sys.stdin.readline())
    os.environ["VERBFLOW_TOKEN"] = line["token"]
    with tempfile.TemporaryDirectory(prefix="verbflow-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(line["job"]))
        code = run_rank(folder, rank)
        record = (folder / f"rank-{rank}.npz").read_bytes()
        sys.stderr.flush()
        print(f"\n{RECORD_MARK}{base64.b64encode(record).decode()}", flush=True)
    return code


def run_rank(folder: Path, rank: int) -> int:
    """Execute the job of ``folder`` as ``rank`` in this process."""
    if os.environ.get("VERBFLOW_PARENT_DEATH") == "1":
        # A runner that was killed takes its ranks with it. Not under mpirun or srun: there the parent is theirs.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Asked by the runner when the time is up, so that the log shows where every thread was.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job = json.loads((folder / "job.json").read_text())
    cell = Cell.from_json(job["cell"])
    token = os.environ.get("VERBFLOW_TOKEN", "")
    deadline = Deadline.after(cell.measure.timeout_ns * 1e-9)
    group: Group | None = None
    try:
        bench = benchmark(cell.bench)
        host = job["hosts"][rank]
        meeting = job["hosts"][0] if job["spread"] else ""
        group = Group(rank, job["size"], folder, token, deadline, meeting, job.get("port", 0))
        context = RankContext(rank, job["size"], group, cell.measure, deadline, folder, token, host)
        record = measure_rank(bench, bench.Params(**cell.params), context)
        code = 0
    except UnavailableError as error:
        record, code = RankRecord(rank, status="skipped", error=str(error)), EXIT_SKIPPED
        print(f"skipped: {error}", file=sys.stderr)
    except Exception as error:  # every failure becomes a record; the traceback stays in the log
        record, code = RankRecord(rank, status="failed", error=f"{type(error).__name__}: {error}"), EXIT_FAILED
        traceback.print_exc()
    finally:
        if group is not None:
            group.close()
    record.facts = {"pid": os.getpid(), "host": os.uname().nodename, "cpus": sorted(os.sched_getaffinity(0))}
    recorded = ("OMP_NUM_THREADS", "OPENBLAS_CORETYPE", memcpy.VARIABLE)
    record.facts |= {name: os.environ[name] for name in recorded if name in os.environ}
    write_rank(folder / f"rank-{rank}.npz", record)
    return code


if __name__ == "__main__":
    sys.exit(main())
