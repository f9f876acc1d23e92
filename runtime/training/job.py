"""Job: one worker's part of a training job, from the model's graph to its report."""

from __future__ import annotations

import argparse
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from runtime.cluster.server import Server
from runtime.cluster.session import Session
from runtime.cluster.spec import task_name
from runtime.deadline import Deadline
from runtime.errors import ConfigError, VerbflowError
from runtime.graph.graph import Graph, Output
from runtime.graph.placement import GreedyByBytes, RoundRobin
from runtime.models import catalog
from runtime.training.data import batches, digits
from runtime.training.optimizers import optimizer
from runtime.training.report import Report
from runtime.training.schemes import Asynchronous, Synchronous, asynchronous, synchronous
from runtime.training.supervisor import RECOVERABLE, Supervisor

_LOG = logging.getLogger("verbflow.training")
_CALL_S = 30.0


class Job:
    """Options are those of ``replica``. ``run`` once, then ``close``."""

    def __init__(self, options: argparse.Namespace, server: Server) -> None:
        self._options = options
        self._server = server
        self._workers = server.cluster.task_count(options.job)
        self._servers = [task for task in server.cluster if task.startswith("/job:ps/")]
        self._chief = options.task == 0
        self._graph = Graph()
        self._build()
        self._session = Session(self._graph, server, step_s=options.step_s, startup_s=options.startup_s)
        self._supervisor = Supervisor(
            self._session,
            chief=self._chief,
            folder=options.checkpoint_dir,
            every_s=options.checkpoint_s,
            every_steps=options.checkpoint_steps,
            recover_s=max(options.recover_s, options.startup_s),
        )
        self._updater: Updater | None = None
        self._step = 0

    def _build(self) -> None:
        options = self._options
        try:
            model_options: dict[str, Any] = json.loads(options.model_options)
        except ValueError as error:
            raise ConfigError(f"--model-options is not JSON: {error}") from None
        if not isinstance(model_options, dict):
            raise ConfigError(f"--model-options is no JSON object: {options.model_options}")
        homes = self._servers or [self._server.name]
        choose = GreedyByBytes(homes) if options.placement == "bytes" else RoundRobin(homes)
        graph = self._graph
        with graph.as_default(), graph.device(self._server.name), graph.variable_devices(choose):
            self._model = catalog.build(options.model, options.batch, **model_options)
            rule = optimizer(options.optimizer, options.rate)
            self._scheme: Asynchronous | Synchronous
            if options.sync == "sync":
                self._scheme = synchronous(
                    self._model.loss,
                    rule,
                    worker=options.task,
                    aggregate=options.aggregate or self._workers,
                    replicas=self._workers,
                    params=self._model.parameters,
                )
            else:
                self._scheme = asynchronous(self._model.loss, rule, self._model.parameters)

    def run(self) -> Report:
        """Train, and report the measured steps."""
        options = self._options
        self._begin()
        feeds = self._feeds()
        for _ in range(options.warmup):
            self._one(next(feeds))
        tracer = self._server.worker.tracer
        before = self._counters()
        tracer.enabled = options.trace
        tracer.clear()
        starts: list[int] = []
        elapsed: list[int] = []
        losses: list[float] = []
        steps: list[int] = []
        while len(elapsed) < options.steps and (not options.global_steps or self._step < options.global_steps):
            fed = next(feeds)
            start = time.monotonic_ns()
            loss, step = self._one(fed)
            elapsed.append(time.monotonic_ns() - start)
            starts.append(start)
            losses.append(loss)
            steps.append(step)
        tracer.enabled = False
        after = self._counters()
        spans, names = tracer.spans()
        return Report(
            np.array(starts, np.int64),
            np.array(elapsed, np.int64),
            np.array(losses, np.float32),
            np.array(steps, np.int64),
            self._facts(),
            {
                task: {name: value - before.get(task, {}).get(name, 0) for name, value in counters.items()}
                for task, counters in after.items()
            },
            spans,
            names,
        )

    def _begin(self) -> None:
        others = [task_name(self._options.job, index) for index in range(self._workers) if index != self._options.task]
        synchronous_ = isinstance(self._scheme, Synchronous)

        def begin() -> None:
            self._step = self._supervisor.prepare()

        self._supervised(begin)
        # Nobody's step waits for another worker but by way of the barrier, which cannot tell who is missing.
        self._session.watch(others, fatal=synchronous_, deadline=Deadline.after(self._options.startup_s))
        if synchronous_ and self._chief:
            assert isinstance(self._scheme, Synchronous)
            self._updater = Updater(
                self._graph, self._server, self._scheme, self._options.step_s, self._options.recover_s
            )

    def _one(self, feeds: dict[Output, np.ndarray]) -> tuple[float, int]:
        def step() -> tuple[float, int]:
            if self._updater is not None:
                self._updater.check()
            scheme = self._scheme
            fetches: list[Any] = [self._model.loss, scheme.train, *self._model.updates]
            if isinstance(scheme, Synchronous):
                values = self._session.run(
                    [scheme.next_step, *fetches], {**feeds, scheme.local_step: np.array(self._step, np.int64)}
                )
            else:
                values = self._session.run([scheme.step, *fetches], feeds)
            return float(values[1]), int(values[0])

        loss, self._step = self._supervised(step)
        self._supervisor.stepped(self._step)
        return loss, self._step

    def _supervised(self, step: Any) -> Any:
        if not self._options.recover_s:
            return step()

        def recovered() -> None:
            self._step = self._supervisor.global_step

        return self._supervisor.run(step, recovered)

    def _feeds(self) -> Iterator[dict[Output, np.ndarray]]:
        options, inputs = self._options, self._model.inputs
        if options.data == "digits":
            dataset = digits()
            (pixels,) = (value for value in inputs.values() if value != self._model.labels)
            stream = batches(dataset, options.batch, worker=options.task, workers=self._workers, seed=options.seed)
            for images, labels in stream:
                yield {pixels: images.reshape(pixels.shape), self._model.labels: labels}
        random = np.random.Generator(np.random.Philox([options.seed, options.task]))
        classes = self._model.logits.shape[-1]
        fixed = {}
        for value in inputs.values():
            if value.dtype.kind in "iu":
                fixed[value] = random.integers(0, classes, value.shape).astype(value.dtype)
            else:
                fixed[value] = random.random(value.shape, np.float32).astype(value.dtype, copy=False)
        while True:
            yield fixed

    def _counters(self) -> dict[str, dict[str, int]]:
        deadline = Deadline.after(_CALL_S)
        found = {self._server.name: self._server.worker.transports.counters()}
        for task in self._servers:
            try:
                found[task] = self._session.trace(task, deadline)[2]
            except RECOVERABLE as error:
                _LOG.warning("no counters of %s: %s", task, error)
        return found

    def _facts(self) -> dict[str, Any]:
        memory = self._server.worker.memory()
        return {
            "task": self._server.name,
            "workers": self._workers,
            "servers": len(self._servers),
            "model": self._options.model,
            "batch": self._options.batch,
            "sync": self._options.sync,
            "parameters": self._model.parameter_count,
            "parameter_bytes": self._model.parameter_bytes,
            "training_flops": self._model.training_flops,
            "policy": self._server.worker.transports.policy,
            "routes": {f"{one} {other}": list(route) for (one, other), route in self._session.routes().items()},
            "settings": self._server.settings,
            "memory": {field.name: int(getattr(memory, field.name)) for field in memory.DESCRIPTOR.fields},
            "recoveries": self._supervisor.recoveries,
            "restored": self._supervisor.restored,
            "saved": self._supervisor.saved,
        }

    def close(self) -> None:
        """Stop what runs beside the steps, and the session."""
        if self._updater is not None:
            self._updater.close()
        try:
            self._supervisor.close(save=self._step > 0)
        finally:
            self._session.close()


class Updater:
    """Runs a synchronous scheme's ``update`` again and again on a thread of its own, with a session of its own: it waits for the
    workers' gradients while the chief computes its own."""

    def __init__(self, graph: Graph, server: Server, scheme: Synchronous, step_s: float, recover_s: float) -> None:
        self._session = Session(graph, server, step_s=step_s)
        self._scheme = scheme
        self._recover_s = recover_s
        self._stop = threading.Event()
        self._error: VerbflowError | None = None
        self._thread = threading.Thread(target=self._run, name="verbflow-updater", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the updates, if something did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        patience: Deadline | None = None
        while not self._stop.is_set():
            try:
                self._session.run(self._scheme.update)
                patience = None
            except RECOVERABLE as error:
                # The workers' own steps fail for the same reason, and it is they who recover.
                patience = patience or Deadline.after(self._recover_s)
                if self._stop.wait(0.2) or not patience.expired():
                    continue
                self._error = error
                return
            except VerbflowError as error:
                self._error = error
                return

    def close(self) -> None:
        """Stop; an update that waits for gradients is aborted."""
        self._stop.set()
        self._session.close()
        self._thread.join()
