"""Optimizers: what a gradient does to its variable, as Apply ops beside the variable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from runtime.errors import ConfigError, GraphError
from runtime.graph.apply_ops import apply_adagrad, apply_adam, apply_momentum, apply_sgd
from runtime.graph.array_ops import group
from runtime.graph.gradients import gradients
from runtime.graph.graph import Node, Output
from runtime.graph.replica_ops import advance_step
from runtime.graph.state_ops import variables


class Optimizer(ABC):
    """``rate`` is a number, or a scalar output of the graph."""

    def __init__(self, rate: Any) -> None:
        self.rate = rate

    @abstractmethod
    def apply(self, variable: Output, gradient: Output) -> Node:
        """The op that changes ``variable``, on its device."""

    def minimise(self, loss: Output, params: Sequence[Output] | None = None, step: Output | None = None) -> Node:
        """One node that differentiates ``loss`` (a scalar), changes every variable of ``params`` (all trainable ones that the loss
        depends on, if none are given) and then counts ``step`` on. Nobody waits for anybody: this is Hogwild when several
        workers do it."""
        return self.apply_gradients(compute_gradients(loss, params), step)

    def apply_gradients(self, pairs: Sequence[tuple[Output, Output]], step: Output | None = None) -> Node:
        """One node that changes every (variable, gradient) pair's variable and then counts ``step`` on."""
        applied = [self.apply(variable, gradient) for variable, gradient in pairs]
        if step is None:
            return group(applied)
        with step.graph.control_dependencies(applied):
            return advance_step(step).node


def compute_gradients(loss: Output, params: Sequence[Output] | None = None) -> list[tuple[Output, Output]]:
    """(variable, gradient) pairs. GraphError if the loss is no scalar or depends on none of the variables; a variable that it
    does not depend on is left out if ``params`` is not given, and an error if it is."""
    if loss.shape != ():
        raise GraphError(f"the loss {loss.name} is {loss.spec}, not a scalar")
    chosen = list(params) if params is not None else [v for v in variables(loss.graph) if v.dtype.kind == "f"]
    found = gradients(loss, chosen)
    missing = [variable.name for variable, gradient in zip(chosen, found, strict=True) if gradient is None]
    if params is not None and missing:
        raise GraphError(f"the loss {loss.name} does not depend on {', '.join(missing)}")
    pairs = [(variable, gradient) for variable, gradient in zip(chosen, found, strict=True) if gradient is not None]
    if not pairs:
        raise GraphError(f"the loss {loss.name} depends on no variable")
    return pairs


class SGD(Optimizer):
    """var -= rate gradient"""

    def apply(self, variable: Output, gradient: Output) -> Node:
        return apply_sgd(variable, gradient, self.rate)


class Momentum(Optimizer):
    """Stochastic gradient descent with momentum; one slot a variable."""

    def __init__(self, rate: Any, momentum: float = 0.9, nesterov: bool = False) -> None:
        super().__init__(rate)
        self.momentum = momentum
        self.nesterov = nesterov

    def apply(self, variable: Output, gradient: Output) -> Node:
        return apply_momentum(variable, gradient, self.rate, self.momentum, self.nesterov)


class Adagrad(Optimizer):
    """Duchi et al., 2011; one slot a variable, which begins at ``initial``."""

    def __init__(self, rate: Any, initial: float = 0.1) -> None:
        super().__init__(rate)
        self.initial = initial

    def apply(self, variable: Output, gradient: Output) -> Node:
        return apply_adagrad(variable, gradient, self.rate, self.initial)


class Adam(Optimizer):
    """Kingma and Ba, 2015; two slots and a counter a variable."""

    def __init__(self, rate: Any = 1e-3, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> None:
        super().__init__(rate)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def apply(self, variable: Output, gradient: Output) -> Node:
        return apply_adam(variable, gradient, self.rate, self.beta1, self.beta2, self.epsilon)


_BY_NAME = {"sgd": SGD, "momentum": Momentum, "adagrad": Adagrad, "adam": Adam}


def optimizer(name: str, rate: float) -> Optimizer:
    """An optimizer by its name; ConfigError lists the known ones on a miss."""
    if name not in _BY_NAME:
        raise ConfigError(f"unknown optimizer {name!r}; known: {', '.join(_BY_NAME)}")
    return _BY_NAME[name](rate)
