"""Is the instrument honest? ``python -m harness.analysis.instrument [--quick] [--json]``

Two questions, answered with real measurements of this machine:

*False verdicts.* The same benchmark is measured against itself, ``transfer`` over inproc and over grpc, as two cells that
differ in nothing but a parameter that does nothing. Re-run: several independent experiments of interleaved rounds, each
compared as an experiment compares. Resampled: from all rounds, subsets are drawn without replacement and their sides swapped
by the toss of a coin. Of 400 comparisons the upper 95 % bound of the rate of "faster" and "slower" must be at most 7 %.

*Missed differences.* A busy wait of a tenth of the median is added to one side; it must be called slower in at least 90 of 100
comparisons, drawn the same way.

The two processes have processors of their own: where they wander, 64 KiB over gRPC take 260 to 470 us by luck, and a tenth is
found in three of five comparisons only.

Takes five minutes to half an hour; not part of CI.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness import store
from harness.analysis import frames, stats

ROUNDS = 10
COMPARISONS = 400
INJECTED = 100
MARGIN = 0.03
_DEFINITION = """
title = "Instrument"
rounds = {rounds}
seed = {seed}
[measure]
min_time = "{time}"
warmup_time = "40ms"
traced_iterations = 0
max_iterations = 3000
[launcher]
name = "local"
cpus = "split"
[[sweep]]
name = "first"
bench = "transfer"
[sweep.axes]
transport = "{transport}"
nbytes = "{nbytes}"
delay_ns = ["0ns", "1ns", "{delay}ns"]
"""


def measure(transport: str, nbytes: str, rounds: int, seed: int, delay_ns: int, time: str, folder: Path) -> list[list]:
    """Durations of the plain side, of the side that is told to wait 1 ns (which is nothing beside the clock), and of the delayed
    one; each a list over rounds."""
    path = folder / f"instrument_{transport}_{seed}.toml"
    path.write_text(
        _DEFINITION.format(rounds=rounds, seed=seed, transport=transport, nbytes=nbytes, delay=delay_ns, time=time)
    )
    # A process of its own: this package does not import the benchmarks.
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "run", str(path), "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"measuring failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    results = store.load(Path(json.loads(done.stdout)["folder"]))
    durations = frames.trial_samples(results)
    runs = results.runs.sort_values("round")
    return [[durations[run_id] for run_id in runs[runs["delay_ns"] == delay]["run_id"]] for delay in (0, 1, delay_ns)]


def draw(sides: Sequence[Sequence[np.ndarray]], rounds: int, chooser: np.random.Generator, swap: bool) -> str:
    """The verdict on a random subset of rounds, with sides swapped in each of them at random if ``swap``."""
    chosen = chooser.choice(len(sides[0]), size=min(rounds, len(sides[0])), replace=False)
    first, second = [], []
    for at in chosen:
        pair = (sides[0][at], sides[1][at])
        if swap and chooser.random() < 0.5:
            pair = pair[::-1]
        first.append(pair[0])
        second.append(pair[1])
    return stats.verdict(stats.paired_ratio(first, second, seed=int(chooser.integers(1 << 31))), MARGIN)


def examine(quick: bool = False) -> dict[str, object]:
    """Measure and count; the answer has both figures and whether they are good enough."""
    experiments, rounds, time = (1, 12, "60ms") if quick else (4, 30, "150ms")
    pools: dict[str, list[list[list[np.ndarray]]]] = {}
    with tempfile.TemporaryDirectory(prefix="verbflow-instrument-") as name:
        folder = Path(name)
        # Both within the caches: a copy that waits for memory goes on in the injected wait, which then costs half of itself.
        for transport, nbytes in (("inproc", "64KiB"), ("grpc", "64KiB")):
            trial = measure(transport, nbytes, 3, 99, 1000, time, folder)
            typical = float(np.median(np.concatenate(trial[0])))
            pools[transport] = [
                measure(transport, nbytes, rounds, seed, max(2, int(typical / 10)), time, folder)
                for seed in range(experiments)
            ]
    chooser = np.random.default_rng(1)
    false, rerun, found = 0, 0, 0
    comparisons = 0
    for pool in pools.values():
        for sides in pool:
            # Re-run: consecutive rounds of independent experiments, as they were measured.
            for start in range(0, rounds - ROUNDS + 1, ROUNDS):
                part = [side[start : start + ROUNDS] for side in sides[:2]]
                verdict = stats.verdict(stats.paired_ratio(part[0], part[1]), MARGIN)
                false += verdict in ("faster", "slower")
                rerun += 1
    comparisons = rerun
    everything = {
        transport: [[array for sides in pool for array in sides[side]] for side in range(3)]
        for transport, pool in pools.items()
    }
    names = list(everything)
    while comparisons < COMPARISONS:
        sides = everything[names[comparisons % len(names)]]
        false += draw(sides[:2], ROUNDS, chooser, swap=True) in ("faster", "slower")
        comparisons += 1
    for count in range(INJECTED):
        sides = everything[names[count % len(names)]]
        found += draw([sides[0], sides[2]], ROUNDS * 2, chooser, swap=False) == "slower"
    bound = stats.binomial_upper(false, comparisons)
    return {
        "comparisons": comparisons,
        "of which re-run": rerun,
        "false verdicts": false,
        "upper 95 % bound of their rate": round(bound, 4),
        "injected 10 % found": found,
        "of": INJECTED,
        "honest": bound <= 0.07 and found >= 0.9 * INJECTED,
    }


def main() -> int:
    """0 if both figures are good enough, else 1."""
    parser = argparse.ArgumentParser(prog="python -m harness.analysis.instrument", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it works, not the figures")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = examine(arguments.quick)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")
    return 0 if figures["honest"] else 1


if __name__ == "__main__":
    sys.exit(main())
