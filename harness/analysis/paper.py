"""The paper's printed numbers as a dataframe, and the same figures by simulation.

Jia et al. 2018: AlexNet, one parameter server and n workers over three networks. A *point* is one bar or one mark of a
figure: cluster, transport, workers, global steps a second, and the ``way`` to the number (``printed``, ``simulated``,
``emulated``, ``hardware``). ``calibrates`` marks the points that set a parameter and so prove nothing.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from harness.analysis.simulation import Network, simulate
from harness.analysis.training_step import Layer, training_step

PRINTED = Path(__file__).parents[2] / "experiments" / "paper" / "printed.toml"

FLOAT_BYTES = 4
# A forward pass is one third of a training step's operations: the backward pass does two products a weight.
FORWARD_SHARE = 1 / 3
# Compute time of one step varies: Fig. 5's own bars scatter by 10-15 % around any smooth curve. It is what mixes the
# phases of asynchronous workers.
JITTER = 0.3
SEEDS = range(3)


@dataclass(frozen=True, slots=True)
class Printed:
    """The paper's numbers: its points, its model's layers, and seconds a step without distribution by cluster."""

    points: pd.DataFrame
    layers: list[Layer]
    single_step_seconds: dict[str, float]
    global_steps: int

    @property
    def model_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def printed(path: Path = PRINTED) -> Printed:
    """Read the printed numbers."""
    with path.open("rb") as file:
        data = tomllib.load(file)
    steps = data["global_steps"]
    rows: dict[tuple[str, str, int], dict[str, object]] = {}
    # Figure 5's seconds are printed, figure 6's marks are read off: where both show a point the former wins.
    for figure, convert in (("figure6", float), ("figure5", lambda seconds: steps / seconds)):
        for cluster, transports in data[figure].items():
            for transport, shown in transports.items():
                for workers, value in next(iter(shown.values())).items():
                    rows[cluster, transport, int(workers)] = {
                        "figure": figure,
                        "cluster": cluster,
                        "transport": transport,
                        "workers": int(workers),
                        "steps_per_second": convert(value),
                    }
    points = pd.DataFrame(rows.values()).assign(way="printed", calibrates=False)
    single = {
        cluster: shown["seconds"] / steps if "seconds" in shown else 1 / shown["steps_per_second"]
        for cluster, shown in data["single_node"].items()
    }
    layers = [Layer(row["name"], row["parameters"] * FLOAT_BYTES, row["flops"]) for row in data["layers"]]
    return Printed(points.sort_values(["cluster", "transport", "workers"], ignore_index=True), layers, single, steps)


def network_bandwidth(paper: Printed, cluster: str, transport: str) -> float:
    """Bytes a second of one worker's link, from the bar of one worker: what its step takes beyond the single node's is the
    time for the weights one way and the gradients the other, one after the other (section 1 of docs/paper.md)."""
    points = paper.points
    bar = points[(points.cluster == cluster) & (points.transport == transport) & (points.workers == 1)]
    if bar.empty:
        raise ValueError(f"the paper prints no bar of one worker for {transport} on cluster {cluster}")
    network_seconds = 1 / bar.steps_per_second.item() - paper.single_step_seconds[cluster]
    return 2 * paper.model_bytes / network_seconds


def steps_per_second(paper: Printed, cluster: str, network: Network, workers: int) -> float:
    """Simulated global steps a second, mean over seeds. Weights first, then compute, then gradients, as the bar of one
    worker shows: its network time adds to its compute time in full. So the model is one layer. Workers begin evenly over
    the time that a step takes alone."""
    compute = paper.single_step_seconds[cluster]
    whole = [Layer("model", paper.model_bytes, 1.0)]
    steps = [
        training_step(
            f"worker{rank}",
            ["ps"],
            whole,
            FORWARD_SHARE * compute,
            (1 - FORWARD_SHARE) * compute,
            overlap=False,
        )
        for rank in range(workers)
    ]
    alone = compute + 2 * paper.model_bytes / network.bandwidth
    seconds = [
        simulate(steps, network, paper.global_steps, stagger=alone / workers, jitter=JITTER, seed=seed).seconds
        for seed in SEEDS
    ]
    return paper.global_steps / float(np.mean(seconds))


def fit_contention(paper: Printed, cluster: str, transport: str) -> Network:
    """The network of one column: bandwidth from the bar of one worker, contention from that of the most workers."""
    bandwidth = network_bandwidth(paper, cluster, transport)
    points = paper.points[(paper.points.cluster == cluster) & (paper.points.transport == transport)]
    last = points.loc[points.workers.idxmax()]

    def miss(contention: float) -> float:
        network = Network(bandwidth, contention=contention)
        simulated = steps_per_second(paper, cluster, network, int(last.workers))
        return abs(simulated / last.steps_per_second - 1)

    return Network(bandwidth, contention=min(np.arange(0.0, 0.51, 0.05), key=miss))


def simulated(paper: Printed) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every printed point by simulation, and the parameters that it took (one row a cluster and transport)."""
    points, parameters = [], []
    for (cluster, transport), bars in paper.points.groupby(["cluster", "transport"], sort=True):
        network = fit_contention(paper, cluster, transport)
        parameters.append(
            {
                "cluster": cluster,
                "transport": transport,
                "bandwidth": network.bandwidth,
                "contention": network.contention,
            }
        )
        for bar in bars.itertuples():
            points.append(
                {
                    "figure": bar.figure,
                    "cluster": cluster,
                    "transport": transport,
                    "workers": bar.workers,
                    "steps_per_second": steps_per_second(paper, cluster, network, bar.workers),
                    "way": "simulated",
                    "calibrates": bar.workers in (1, bars.workers.max()),
                }
            )
    return pd.DataFrame(points), pd.DataFrame(parameters)


def beside_printed(paper: Printed, points: pd.DataFrame) -> pd.DataFrame:
    """Points beside the printed ones: ``printed`` and ``error`` (relative, in seconds a step: +0.1 is 10 % slower)."""
    where = ["cluster", "transport", "workers"]
    reference = paper.points[[*where, "steps_per_second"]].rename(columns={"steps_per_second": "printed"})
    joined = points.merge(reference, on=where, validate="many_to_one")
    return joined.assign(error=joined.printed / joined.steps_per_second - 1)
