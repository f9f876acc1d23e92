"""Schemes: how several workers train one set of variables on parameter servers (between-graph replication).

Each worker builds its own graph with these functions and drives its own steps. With g the gradient, T a window of local
steps, W the servers' variables and w a worker's own copy:

| scheme | rule |
|---|---|
| ``asynchronous`` | Hogwild: each worker W <- W - rate g(W), no locks, nobody waits |
| ``synchronous`` | W changes once by the mean of the first N of M workers' gradients of one step; late ones are dropped |
| ``downpour`` | T local steps on w; push the sum of g; W is changed by it; w <- W (Dean et al., 2012) |
| ``agn`` | as downpour, but the mean of g is pushed (Hermans, 2017) |
| ``sagn`` | as agn, but the means are aggregated as in ``synchronous`` |

The gradients of a window are each computed at the worker's current w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.errors import ConfigError
from runtime.graph.array_ops import group, identity, placeholder, zeros_like
from runtime.graph.graph import Node, Output
from runtime.graph.initialisers import zeros
from runtime.graph.math_ops import mul
from runtime.graph.replica_ops import accumulator_apply, accumulator_take, advance_step, await_step
from runtime.graph.state_ops import GLOBAL_STEP, assign, assign_add, variable
from runtime.tensor import TensorSpec
from runtime.training.optimizers import Optimizer, compute_gradients


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Run ``train`` for a step. ``step`` is the global step after it, counted on by every worker's every step."""

    train: Node
    step: Output


@dataclass(frozen=True, slots=True)
class Synchronous:
    """Run ``train`` for a step, feeding ``local_step`` with what ``next_step`` gave the last time (at first: the global step).

    Somebody, usually worker 0 on a thread of its own, must run ``update`` again and again: each run waits for N gradients of
    every variable, applies their means and lets the workers go on.
    """

    train: Node
    local_step: Output
    next_step: Output
    update: Node
    step: Output


@dataclass(frozen=True, slots=True)
class LocalUpdates:
    """``pull`` once at first; then ``window`` times ``local``, then ``exchange``, and so on.

    ``synchronous`` is set where the exchange is one of N of M workers: then feed and fetch as in ``Synchronous``, which is
    what ``exchange`` pushes into; afterwards run ``pull``.
    """

    window: int
    pull: Node
    local: Node
    exchange: Node
    step: Output
    synchronous: Synchronous | None = None


def asynchronous(loss: Output, optimizer: Optimizer, params: Sequence[Output] | None = None) -> Asynchronous:
    """Every worker pulls, computes and pushes on its own; pulls may see updates half done."""
    pairs = compute_gradients(loss, params)
    train = optimizer.apply_gradients(pairs, shared_step(pairs[0][0]))
    return Asynchronous(train, train.out)


def shared_step(beside: Output) -> Output:
    """The graph's global step; made on the task of the variable ``beside`` if there is none, so that all workers share it."""
    graph = beside.graph
    if GLOBAL_STEP in graph:
        return graph.node(GLOBAL_STEP).out
    with graph.root_scope():
        return variable(GLOBAL_STEP, (), np.int64, colocate=beside)


def synchronous(
    loss: Output,
    optimizer: Optimizer,
    *,
    worker: int,
    aggregate: int,
    replicas: int,
    params: Sequence[Output] | None = None,
) -> Synchronous:
    """``aggregate`` of ``replicas`` workers' gradients make a step. ``worker`` is this one's number: sums are taken in the order of
    the numbers, so results do not depend on who was first."""
    return _aggregated(compute_gradients(loss, params), optimizer, worker, aggregate, replicas)


def _aggregated(
    pairs: Sequence[tuple[Output, Output]], optimizer: Optimizer, worker: int, aggregate: int, replicas: int
) -> Synchronous:
    if not 1 <= aggregate <= replicas or not 0 <= worker < replicas:
        raise ConfigError(f"{aggregate} gradients of {replicas} replicas, as replica {worker}: that cannot be")
    graph = pairs[0][0].graph
    step = shared_step(pairs[0][0])
    with graph.as_default(), graph.scope("synchronous"):
        # On the task that works, or on the step's, where it costs one more edge: wherever placement puts it.
        local_step = placeholder((), np.int64, name="local_step")
        pushed = [accumulator_apply(target, gradient, local_step, worker) for target, gradient in pairs]
        next_step = await_step(step, local_step)
        # The mean is of the gradients of this step's variables, so nothing orders it after this worker's push.
        applied = [optimizer.apply(target, accumulator_take(target, aggregate)) for target, _ in pairs]
        with graph.control_dependencies(applied):
            update = advance_step(step).node
        return Synchronous(group([*pushed, next_step]), local_step, next_step, update, step)


def downpour(
    loss: Output, local: Optimizer, server: Optimizer, *, window: int, place: Callable[[TensorSpec], str]
) -> LocalUpdates:
    """The sum of a window's gradients is pushed. ``loss`` is of the worker's own copies: build the model on the worker's device;
    the servers' variables (``server/...``, beginning equal) are made here, on the tasks that ``place`` chooses."""
    return _local_updates(loss, local, server, window, place, mean=False)


def agn(
    loss: Output, local: Optimizer, server: Optimizer, *, window: int, place: Callable[[TensorSpec], str]
) -> LocalUpdates:
    """As ``downpour``, but the mean of the window's gradients is pushed."""
    return _local_updates(loss, local, server, window, place, mean=True)


def sagn(
    loss: Output,
    local: Optimizer,
    server: Optimizer,
    *,
    window: int,
    place: Callable[[TensorSpec], str],
    worker: int,
    aggregate: int,
    replicas: int,
) -> LocalUpdates:
    """As ``agn``, but ``aggregate`` of ``replicas`` workers' means make one change of the servers' variables."""
    return _local_updates(loss, local, server, window, place, mean=True, members=(worker, aggregate, replicas))


def _local_updates(
    loss: Output,
    local: Optimizer,
    server: Optimizer,
    window: int,
    place: Callable[[TensorSpec], str],
    mean: bool,
    members: tuple[int, int, int] | None = None,
) -> LocalUpdates:
    if window < 1:
        raise ConfigError(f"a window of {window} local steps cannot be")
    graph = loss.graph
    pairs = compute_gradients(loss)
    with graph.as_default():
        gathered = []
        changed = []
        for own, gradient in pairs:
            with graph.colocate_with(own.node):
                total = variable(f"{own.node.name}/gathered", own.shape, own.dtype, zeros(), colocate=own)
            gathered.append(total)
            changed.append(assign_add(total, gradient).node)
            changed.append(local.apply(own, gradient))
        local_step = group(changed)
        theirs = [_server_copy(own, place) for own, _ in pairs]
        step = shared_step(theirs[0])
        pushed: list[tuple[Output, Output]] = []
        for target, total in zip(theirs, gathered):
            with graph.colocate_with(total.node):
                pushed.append((target, mul(total, 1.0 / window) if mean else identity(total)))
        aggregated = _aggregated(pushed, server, *members) if members is not None else None
        exchanged = aggregated.train if aggregated is not None else server.apply_gradients(pushed, step)
        cleared = []
        for (_, sent), total in zip(pushed, gathered):
            # After it was read: on one device a variable's reads and writes keep their order here.
            with graph.control_dependencies([sent.node]), graph.colocate_with(total.node):
                cleared.append(assign(total, zeros_like(total)).node)
        pulled = [assign(own, target).node for (own, _), target in zip(pairs, theirs)]
        pull = group(pulled)
        exchange = group([exchanged, *cleared] if aggregated is not None else [exchanged, *cleared, *pulled])
    return LocalUpdates(window, pull, local_step, exchange, step, aggregated)


def _server_copy(own: Output, place: Callable[[TensorSpec], str]) -> Output:
    """The servers' variable for a worker's own one, with the same initial value."""
    graph = own.graph
    attrs = dict(own.node.attrs)
    name = f"server/{own.node.name}"
    attrs["variable"] = name
    with graph.root_scope():
        return graph.add("Variable", name=name, device=place(own.spec), colocate="", **attrs).out
