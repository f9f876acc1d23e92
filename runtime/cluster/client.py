"""WorkerClient: the calls of one task's control plane, made from another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import grpc

from runtime.cluster.proto import control_pb2_grpc
from runtime.cluster.rpc import Tls, credentials, open_channel, translate
from runtime.deadline import Deadline
from runtime.errors import ConfigError
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

    def start(self, method: str, request: Any, deadline: Deadline, *, wait_for_ready: bool = False) -> Future[Any]:
        """Make a call whose answer comes into the future, on one of gRPC's threads."""
        future: Future[Any] = Future(f"{method} at {self.task} ({self.address})")
        try:
            call = self._method(method).future(
                request, timeout=deadline.remaining(), metadata=self._metadata, wait_for_ready=wait_for_ready
            )
        except ValueError as error:  # the channel was closed
            future.set_exception(ConfigError(f"{method} at {self.task}: {error}"))
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
            yield from self._method(method)(request, timeout=deadline.remaining(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, method, self.task, self.address, deadline.elapsed()) from error

    def upload(self, method: str, requests: Iterable[Any], deadline: Deadline) -> Any:
        """A call that streams its requests."""
        try:
            return self._method(method)(iter(requests), timeout=deadline.remaining(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, method, self.task, self.address, deadline.elapsed()) from error

    def close(self) -> None:
        """Cancel what is running and close the connection. Idempotent."""
        self._channel.close()

    def _method(self, name: str) -> Any:
        return getattr(self._stub, name)
