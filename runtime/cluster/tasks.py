"""The tasks of a cluster as a master sees them: one in its own process, the others behind a control channel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from runtime.cluster.client import StepStream, WorkerClient
from runtime.cluster.messages import check_size, chunks, pack, unpack, variables
from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.worker import Worker
from runtime.deadline import Deadline
from runtime.errors import StepAbortedError, VerbflowError
from runtime.future import Future, completed, failed

# An abort is advice: who does not get it runs into the step's deadline.
ABORT_S = 5.0


class LocalTask:
    """The master's own process: calls are made on the caller's thread, and tensors are handed over as they are."""

    def __init__(self, worker: Worker, address: str) -> None:
        self.name = worker.task
        self.address = address
        self._worker = worker
        self._methods: dict[str, Callable[[Any, Deadline], Any]] = {
            "GetStatus": lambda request, _: worker.status(request),
            "ResolvePeers": lambda request, _: worker.resolve(request),
            "RegisterGraph": lambda request, _: worker.register(request),
            "BindEdges": worker.bind,
            "CleanupGraph": lambda request, _: worker.cleanup(list(request.steps)),
            "DeregisterGraph": lambda request, _: worker.deregister(request.session, list(request.handles)),
            "ListVariables": lambda request, _: pb.VariablesReply(nbytes=worker.variables(request.container)),
            "CollectTrace": lambda request, _: worker.trace(request),
        }

    def start(self, method: str, request: Any, deadline: Deadline, *, wait_for_ready: bool = False) -> Future[Any]:
        """The call, made now; its outcome is in the future."""
        try:
            return completed(self._methods[method](request, deadline))
        except VerbflowError as error:
            return failed(error)

    def run_step(
        self, handle: str, step: int, generation: int, feeds: list[np.ndarray], deadline: Deadline, finished: list[int]
    ) -> list[np.ndarray]:
        """Run a step on this thread."""
        self._worker.cleanup(finished)
        return self._worker.run(handle, step, generation, feeds, deadline)

    def abort(self, step: int, reason: BaseException) -> None:
        self._worker.abort(step, reason)

    def save(self, container: str, names: list[str], deadline: Deadline) -> Iterator[tuple[str, np.ndarray]]:
        """Copies of variables, all of one moment."""
        return self._worker.save(container, names)

    def restore(self, container: str, values: Iterable[tuple[str, np.ndarray]], deadline: Deadline) -> None:
        """Set variables, all at one moment."""
        self._worker.restore(dict(values), container)

    def lose(self, reason: VerbflowError) -> None:
        """Cannot happen: it is this process."""

    def close(self) -> None:
        """The worker is its server's to close."""


class RemoteTask:
    """A task in another process."""

    def __init__(self, client: WorkerClient) -> None:
        self.name = client.task
        self.address = client.address
        self.client = client
        self._streams: set[StepStream] = set()
        self._idle: list[StepStream] = []
        self._guard = threading.Lock()

    def start(self, method: str, request: Any, deadline: Deadline, *, wait_for_ready: bool = False) -> Future[Any]:
        return self.client.start(method, request, deadline, wait_for_ready=wait_for_ready)

    def start_step(
        self, handle: str, step: int, generation: int, feeds: list[np.ndarray], deadline: Deadline, finished: list[int]
    ) -> Future[list[np.ndarray]]:
        """Run a step there. The future is set on the stream's thread; it fails when the task is lost."""
        check_size(feeds, "feeds")
        request = pb.RunRequest(
            handle=handle,
            step=step,
            generation=generation,
            timeout_s=deadline.remaining(),
            feeds=[pack(array) for array in feeds],
            finished=finished,
        )
        with self._guard:
            stream = self._idle.pop() if self._idle else None
        if stream is None or stream.broken is not None:
            try:
                stream = self.client.open_steps()
            except StepAbortedError as error:
                return failed(error)
            with self._guard:
                self._streams = {other for other in self._streams if other.broken is None} | {stream}
        answer = stream.start(request)
        future: Future[list[np.ndarray]] = Future(answer.what)

        def done(finished: Future[pb.RunReply]) -> None:
            error = finished.exception(deadline)
            if stream.broken is None:
                with self._guard:
                    self._idle.append(stream)
            if error is not None:
                future.set_exception(error)
                return
            try:
                future.set_result([unpack(tensor) for tensor in finished.result(deadline).fetches])
            except VerbflowError as malformed:
                future.set_exception(malformed)

        answer.add_done_callback(done)
        return future

    def abort(self, step: int, reason: BaseException) -> None:
        """Tell the task; does not wait."""
        name = type(reason).__name__ if isinstance(reason, VerbflowError) else StepAbortedError.__name__
        request = pb.AbortRequest(step=step, error=name, reason=str(reason)[:2000])
        self.client.start("AbortStep", request, Deadline.after(ABORT_S))

    def save(self, container: str, names: list[str], deadline: Deadline) -> Iterator[tuple[str, np.ndarray]]:
        messages = self.client.stream("SaveVariables", pb.SaveRequest(container=container, names=names), deadline)
        return ((name, array) for _, name, array in variables(messages))

    def restore(self, container: str, values: Iterable[tuple[str, np.ndarray]], deadline: Deadline) -> None:
        messages = (chunk for name, array in values for chunk in chunks(container, name, np.asarray(array, order="C")))
        self.client.upload("RestoreVariables", messages, deadline)

    def lose(self, reason: VerbflowError) -> None:
        """Fail the steps that run there: the task is lost, or does not answer. Does not wait."""
        with self._guard:
            streams = list(self._streams)
            self._idle.clear()
        for stream in streams:
            stream.abort(reason)

    def close(self) -> None:
        """Close the connection; waits for its threads."""
        with self._guard:
            streams, self._streams = self._streams, set()
            self._idle.clear()
        for stream in streams:
            stream.close()
        self.client.close()


Task = LocalTask | RemoteTask
