"""WorkerClient and StepStream: the calls of one task's control plane, made from another process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import grpc

from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.proto import control_pb2_grpc
from runtime.cluster.rpc import Tls, credentials, error_named, open_channel, translate
from runtime.deadline import Deadline
from runtime.errors import ConfigError, PeerLostError, StepAbortedError, VerbflowError
from runtime.future import Future


class WorkerClient:
    """Methods are named as in ``control.proto``. Any thread may call; every call has a deadline and raises errors of ours."""

    def __init__(self, task: str, address: str, token: str, tls: Tls | None = None) -> None:
        self.task = task
        self.address = address
        self._metadata = credentials(token)
        self._channel = open_channel(address, tls)
        self._stub = control_pb2_grpc.WorkerStub(self._channel)

    def call(self, method: str, request: Any, deadline: Deadline, *, wait_for_ready: bool = False) -> Any:
        """Make a call and wait. ``wait_for_ready`` keeps trying until the task is up or the deadline passes."""
        try:
            return self._method(method)(
                request, timeout=deadline.remaining(), metadata=self._metadata, wait_for_ready=wait_for_ready
            )
        except grpc.RpcError as error:
            raise translate(error, method, self.task, self.address, deadline.elapsed()) from error
        except ValueError as error:
            raise self._closed(method, error) from error

    def start(self, method: str, request: Any, deadline: Deadline, *, wait_for_ready: bool = False) -> Future[Any]:
        """Make a call whose answer comes into the future, on one of gRPC's threads."""
        future: Future[Any] = Future(f"{method} at {self.task} ({self.address})")
        try:
            call = self._method(method).future(
                request, timeout=deadline.remaining(), metadata=self._metadata, wait_for_ready=wait_for_ready
            )
        except ValueError as error:
            future.set_exception(self._closed(method, error))
            return future

        def done(finished: Any) -> None:
            if finished.cancelled() or finished.exception() is not None:
                cause = finished if isinstance(finished, grpc.RpcError) else finished.exception()
                failure = translate(cause, method, self.task, self.address, deadline.elapsed())
                failure.__cause__ = cause
                future.set_exception(failure)
            else:
                future.set_result(finished.result())

        call.add_done_callback(done)
        return future

    def stream(self, method: str, request: Any, deadline: Deadline) -> Iterator[Any]:
        """Answers of a call that streams them."""
        try:
            answers = self._method(method)(request, timeout=deadline.remaining(), metadata=self._metadata)
        except ValueError as error:
            raise self._closed(method, error) from error
        try:
            yield from answers
        except grpc.RpcError as error:
            raise translate(error, method, self.task, self.address, deadline.elapsed()) from error

    def upload(self, method: str, requests: Iterable[Any], deadline: Deadline) -> Any:
        """A call that streams its requests; an error of theirs ends the call and is raised as it is."""
        own: list[Exception] = []

        def sent() -> Iterator[Any]:
            try:
                yield from requests
            except Exception as error:
                own.append(error)
                raise

        try:
            return self._method(method)(sent(), timeout=deadline.remaining(), metadata=self._metadata)
        except grpc.RpcError as error:
            if own:
                raise own[0] from error
            raise translate(error, method, self.task, self.address, deadline.elapsed()) from error
        except ValueError as error:
            raise self._closed(method, error) from error

    def open_steps(self) -> StepStream:
        """A call for steps, one at a time; StepAbortedError if this client is closed."""
        try:
            return StepStream(self, self._stub.RunGraph, self._metadata)
        except ValueError as error:
            raise StepAbortedError(f"the connection to {self.task} ({self.address}) was closed") from error

    def close(self) -> None:
        """Cancel what is running and close the connection. Idempotent."""
        self._channel.close()

    def _closed(self, method: str, error: ValueError) -> ConfigError:
        """What gRPC's complaint about a call on a closed channel means."""
        return ConfigError(f"{method} at {self.task}: {error}")

    def _method(self, name: str) -> Any:
        return getattr(self._stub, name)


class StepStream:
    """One open RunGraph call: a step at a time, the answer in a future. ``start`` is called by one thread at a time, and
    only while no step is running; ``broken`` streams are thrown away."""

    def __init__(self, client: WorkerClient, method: Any, metadata: Any) -> None:
        self._client = client
        self._requests: queue.SimpleQueue[pb.RunRequest | None] = queue.SimpleQueue()
        self._pending: Future[pb.RunReply] | None = None
        self._started_ns = 0
        self._guard = threading.Lock()
        self.broken: VerbflowError | None = None
        self._call = method(iter(self._requests.get, None), metadata=metadata, wait_for_ready=False)
        self._reader = threading.Thread(target=self._read, name="verbflow-steps", daemon=True)
        self._reader.start()

    def start(self, request: pb.RunRequest) -> Future[pb.RunReply]:
        """Run a step; the future fails with what the task answered, or with the loss of the task."""
        future: Future[pb.RunReply] = Future(f"step {request.step:#x} at {self._client.task} ({self._client.address})")
        with self._guard:
            if self.broken is not None:
                future.set_exception(self.broken)
                return future
            self._pending, self._started_ns = future, time.monotonic_ns()
        self._requests.put(request)
        return future

    def _read(self) -> None:
        try:
            for reply in self._call:
                with self._guard:
                    pending, self._pending = self._pending, None
                if pending is None:
                    continue
                if reply.error:
                    pending.set_exception(error_named(reply.error, reply.reason))
                else:
                    pending.set_result(reply)
            self._break(PeerLostError(f"{self._client.task} ({self._client.address}) ended its steps"), None)
        except grpc.RpcError as error:
            waited_s = (time.monotonic_ns() - self._started_ns) * 1e-9
            self._break(translate(error, "RunGraph", self._client.task, self._client.address, waited_s), error)

    def _break(self, reason: VerbflowError, cause: BaseException | None) -> None:
        if cause is not None:
            reason.__cause__ = cause
        with self._guard:
            self.broken = self.broken or reason
            pending, self._pending = self._pending, None
        self._requests.put(None)  # gRPC's sending thread waits for a request, also when the call is over
        if pending is not None:
            pending.set_exception(reason)

    def abort(self, reason: VerbflowError) -> None:
        """Fail the step that is running with ``reason`` and end the call, without waiting."""
        self._break(reason, None)
        self._call.cancel()

    def close(self) -> None:
        """End the call; a step that is running is aborted at the task. Waits for the reader."""
        self._requests.put(None)
        self._call.cancel()
        if self._reader is not threading.current_thread():
            self._reader.join()
