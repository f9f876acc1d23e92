"""LSTM language model as dlbench trains it on the Penn Treebank: embedding, two layers of 256 units, softmax over words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.graph import array_ops as ops
from runtime.graph import initialisers, nn_ops
from runtime.graph.graph import Output
from runtime.models.layers import Inputs, Layers, Network, classification


@dataclass(frozen=True, slots=True)
class LSTM:
    """Unrolled over ``steps`` words; states begin at zero. ``tokens`` [batch, steps] predict ``labels`` [batch, steps].

    Gates are in the order input, forget, candidate, output, with one bias, which begins at 1 for the forget gate.
    """

    vocabulary: int = 10_000
    units: int = 256
    layers: int = 2
    steps: int = 32

    def inputs(self, batch: int) -> Inputs:
        return {"tokens": ((batch, self.steps), np.int32), "labels": ((batch, self.steps), np.int32)}

    def build(self, layers: Layers, tokens: Output, labels: Output) -> Network:
        batch, size = tokens.shape[0], self.units
        table = layers.parameters.get("embedding", (self.vocabulary, size), initialisers.uniform(-0.1, 0.1))
        # Time first: each step's rows are contiguous, and the input's product is one for all steps.
        words = ops.reshape(ops.transpose(tokens, (1, 0), name="tokens_by_time"), (-1,), name="words")
        x = ops.gather(table, words, name="embedded")
        for index in range(1, self.layers + 1):
            x = self._layer(layers, x, f"lstm{index}", batch)
        logits = layers.dense(x, "softmax", self.vocabulary)
        targets = ops.reshape(ops.transpose(labels, (1, 0), name="labels_by_time"), (-1,), name="targets")
        return classification(logits, targets)

    def _layer(self, layers: Layers, x: Output, name: str, batch: int) -> Output:
        """``x`` [steps * batch, in] -> hidden states [steps * batch, units]."""
        size, steps, inputs = self.units, self.steps, x.shape[1]
        limit = size**-0.5
        get = layers.parameters.get
        inward = get(f"{name}/input_weights", (inputs, 4 * size), initialisers.uniform(-limit, limit))
        recurrent = get(f"{name}/recurrent_weights", (size, 4 * size), initialisers.uniform(-limit, limit))
        start = np.zeros(4 * size, np.float32)
        start[size : 2 * size] = 1
        bias = get(f"{name}/biases", (4 * size,), initialisers.tensor(start))
        given = nn_ops.bias_add(ops.matmul(x, inward, name=f"{name}/inputs"), bias, name=f"{name}/bias")
        layers.product(f"{name}/inputs", 2 * steps * batch * inputs * 4 * size, first=False)
        hidden: Output | None = None
        cell = ops.constant(np.zeros((batch, size), np.float32), name=f"{name}/start")
        states = []
        for at, part in enumerate(ops.split(given, steps, 0, name=f"{name}/by_time")):
            if hidden is not None:
                part = ops.add(part, ops.matmul(hidden, recurrent, name=f"{name}/recurrent_{at}"))
                layers.product(f"{name}/recurrent_{at}", 2 * batch * size * 4 * size)
            hidden, cell = nn_ops.lstm_cell(part, cell, name=f"{name}/cell_{at}")
            states.append(hidden)
        return ops.concat(states, 0, name=f"{name}/hidden")
