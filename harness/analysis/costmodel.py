"""The cost model: what a transfer costs on a transport, and from that what a training step costs.

A transfer of n bytes takes ``alpha + n / beta`` seconds (Hockney 1994), and the bytes beyond the caches' reach may have a beta of
their own. Alpha and beta are fitted to ``transfer`` runs; the operations' seconds come from a traced step. A step of a few
workers is simulated (``simulation``); beyond that the asymptotic bounds of operational analysis hold (Denning and Buzen 1978):
throughput is at most what the busiest resource serves, and at most what workers that never wait would do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from harness.analysis.simulation import Network, simulate
from harness.analysis.training_step import Layer, training_step

# Up to here a scaling curve is simulated; a simulated step costs time in proportion to the square of the workers.
SIMULATED_WORKERS = 16
# Enough global steps a worker for the phases to mix, few enough to draw a curve in seconds.
STEPS_A_WORKER = 12
# Between processes of one machine both ends of a stream work at once; pieces of this size let them.
PIECE_BYTES = 4 << 20
# A fit of one alpha and one beta that is off by more somewhere may bend.
BENT = 0.15


@dataclass(frozen=True, slots=True)
class TransferFit:
    """``alpha`` in seconds, ``beta`` in bytes a second; ``worst`` the largest relative error over the fitted sizes.

    What lies beyond ``knee`` bytes goes at ``far_beta``: a copy is slower once it does not fit into the caches.
    """

    alpha: float
    beta: float
    worst: float
    sizes: int
    knee: float = float("inf")
    far_beta: float = float("inf")

    def seconds(self, nbytes: float) -> float:
        return self.alpha + min(nbytes, self.knee) / self.beta + max(0.0, nbytes - self.knee) / self.far_beta

    @property
    def slowest(self) -> float:
        """Bytes a second of a tensor that is long beside both alpha and the caches."""
        return min(self.beta, self.far_beta)

    def half_bandwidth_bytes(self) -> float:
        """The size at which half of beta is reached (Hockney's n-half)."""
        return self.alpha * self.beta


def fit_transfer(nbytes: Sequence[int], seconds: Sequence[float]) -> TransferFit:
    """Fit alpha and beta to medians of one transport, one entry a size.

    Relative errors count, so that 8 bytes weigh as much as 256 MiB. Where one line leaves an error above BENT, and a line
    that bends at one of the sizes at most half of it, the bent one is taken. ValueError with fewer than two sizes.
    """
    sizes, times = np.asarray(nbytes, float), np.asarray(seconds, float)
    distinct = np.unique(sizes)
    if len(distinct) < 2 or len(sizes) != len(times) or (times <= 0).any():
        raise ValueError("a fit of alpha and beta needs positive times of at least two sizes")
    straight = _fit(sizes, times, float("inf"))
    if straight.worst <= BENT or len(distinct) < 4:
        return straight
    bent = min((_fit(sizes, times, float(knee)) for knee in distinct[1:-1]), key=lambda fit: fit.worst)
    return bent if bent.worst <= straight.worst / 2 else straight


def _fit(sizes: np.ndarray, times: np.ndarray, knee: float) -> TransferFit:
    # Least squares on (alpha + n * gamma) / t = 1, kept non-negative: a negative latency would be an artefact.
    parts = [np.ones(len(sizes)), np.minimum(sizes, knee)]
    if np.isfinite(knee):
        parts.append(np.maximum(0.0, sizes - knee))
    columns = np.stack(parts, axis=1) / times[:, None]
    scale = columns.max(axis=0)
    from scipy.optimize import nnls

    solution = nnls(columns / scale, np.ones(len(times)))[0] / scale
    worst = float(np.abs(columns @ solution - 1).max())
    betas = [1 / float(gamma) if gamma > 0 else float("inf") for gamma in solution[1:]]
    return TransferFit(float(solution[0]), betas[0], worst, len(sizes), knee, betas[-1])


def crossover_bytes(first: TransferFit, second: TransferFit) -> float | None:
    """The smallest size at which the two cost the same; None if one is faster at every size."""
    ends = [0.0, *sorted({fit.knee for fit in (first, second) if np.isfinite(fit.knee)})]
    for begin, end in zip(ends, [*ends[1:], float("inf")], strict=True):
        # Both are straight in between, so two sizes tell where they meet.
        ahead = first.seconds(begin) - second.seconds(begin)
        probe = end if np.isfinite(end) else begin + 1e9
        slope = (first.seconds(probe) - second.seconds(probe) - ahead) / (probe - begin)
        size = begin - ahead / slope if slope else -1.0
        if size > 0 and begin <= size <= end:
            return float(size)
    return None


@dataclass(frozen=True, slots=True)
class Workload:
    """A training step without its network: layers, compute seconds of one worker's step, the parameter server's seconds
    a byte of applied gradient, and examples a step (batch)."""

    layers: Sequence[Layer]
    forward_seconds: float
    backward_seconds: float
    apply_seconds_per_byte: float
    batch: int
    overlap: bool = True

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def one_machine(fit: TransferFit, processor: TransferFit | None = None) -> Network:
    """The network between processes of one machine, where moving a byte is work of a core: use with ``cores``. ``fit`` is of a
    transfer with both ends on the machine.

    ``processor`` is of the processor time that each end spends on it, where both ends work at the same time (a socket): the
    stream between them passes bytes no faster than it was measured to, though neither end is busy all the while. Without it the
    transfer is one copy by the thread that sends.
    """
    if processor is None:
        return Network(float("inf"), handling=fit.seconds, inline=True)
    return Network(fit.slowest, handling=processor.seconds)


def between_machines(fit: TransferFit) -> Network:
    """The network between hosts that ``fit`` was measured on."""
    return Network(bandwidth=fit.slowest, latency=fit.alpha)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Global steps a second of ``workers`` asynchronous workers, examples a second, and what limits them."""

    workers: int
    servers: int
    steps_per_second: float
    examples_per_second: float
    bottleneck: str
    simulated: bool


def predict(
    workload: Workload,
    network: Network,
    workers: int,
    servers: int = 1,
    cores: int | None = None,
    synchronous: bool = False,
) -> Prediction:
    """Predict by simulation up to SIMULATED_WORKERS workers, by the bounds beyond. With ``cores`` all processes share one
    machine and the simulation always runs."""
    limits = bounds(workload, network, workers, servers)
    # Asynchronous workers begin evenly over the time that a step takes alone.
    alone = workload.compute_seconds + (0.0 if workload.overlap else 2 * workload.nbytes / network.bandwidth)
    bottleneck = min(limits, key=lambda name: limits[name])
    simulated = cores is not None or workers <= SIMULATED_WORKERS
    if simulated:
        names = [f"ps{index}" for index in range(servers)]
        steps = [
            training_step(
                f"worker{rank}",
                names,
                workload.layers,
                workload.forward_seconds,
                workload.backward_seconds,
                workload.apply_seconds_per_byte,
                workload.overlap,
                sessions=cores is not None,
                piece_bytes=PIECE_BYTES if cores is not None and not network.inline else None,
            )
            for rank in range(workers)
        ]
        outcome = simulate(
            steps,
            network,
            workers * STEPS_A_WORKER,
            synchronous=synchronous,
            stagger=0.0 if synchronous else alone / workers,
            jitter=0.05,
            cores=cores,
        )
        rate = outcome.rate(skip=workers * 2)
        if cores is not None and sum(outcome.busy.values()) > 0.9 * cores * outcome.seconds:
            bottleneck = "the machine's cores"
    else:
        rate = limits[bottleneck]
    return Prediction(workers, servers, rate, rate * workload.batch, bottleneck, simulated)


def bounds(workload: Workload, network: Network, workers: int, servers: int = 1) -> dict[str, float]:
    """Upper bounds of global steps a second, by resource.

    Servers hold equal shares of the bytes; a link carries the weights one way and the gradients the other. Contention is
    left out: it was fitted for a handful of workers, and an upper bound holds without it.
    """
    handling = 2 * sum(network.handling(layer.nbytes) for layer in workload.layers)
    link = network.bandwidth / workload.nbytes
    apply = workload.apply_seconds_per_byte * workload.nbytes
    alone = workload.compute_seconds + 2 * handling
    if not workload.overlap:
        alone += 2 * (workload.nbytes / network.bandwidth + network.latency)
    return {
        "the workers' compute": workers / alone,
        "the server's link": servers * link,
        "the server's updates": servers / apply if apply else float("inf"),
        "the server's message handling": servers / handling if handling else float("inf"),
    }


def bottlenecks(workload: Workload, network: Network, worker_counts: Iterable[int], servers: int = 1) -> dict[str, int]:
    """For each resource that ever is the bottleneck, the fewest workers (of those given) at which it is."""
    first: dict[str, int] = {}
    for workers in sorted(worker_counts):
        limits = bounds(workload, network, workers, servers)
        first.setdefault(min(limits, key=lambda name: limits[name]), workers)
    return first


def scaling(
    workload: Workload,
    networks: dict[str, Network],
    worker_counts: Iterable[int],
    server_counts: Iterable[int] = (1,),
) -> pd.DataFrame:
    """A prediction for each network, worker count and server count: what the scaling picture is drawn from. Servers hold
    equal shares of the model, as the bounds have it: tensors are split where they must be."""
    rows = []
    servers_of = list(server_counts)
    for workers in worker_counts:
        for servers in servers_of:
            shared = replace(workload, layers=_split(workload.layers, servers))
            for name, network in networks.items():
                prediction = predict(shared, network, workers, servers)
                rows.append(
                    {
                        "network": name,
                        "workers": workers,
                        "servers": servers,
                        "steps_per_second": prediction.steps_per_second,
                        "examples_per_second": prediction.examples_per_second,
                        "bottleneck": prediction.bottleneck,
                        "way": "simulated" if prediction.simulated else "bound",
                    }
                )
    return pd.DataFrame(rows)


def _split(layers: Sequence[Layer], servers: int) -> list[Layer]:
    return [
        Layer(f"{layer.name}/{part}", layer.nbytes // servers, layer.flops / servers)
        for layer in layers
        for part in range(servers)
    ]
