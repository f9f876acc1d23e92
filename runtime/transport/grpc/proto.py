"""grpc_proto: one RecvTensor call a fetch with a TensorProto in the answer, what TensorFlow does.

Kept as it is usually written, so that the two gRPC transports together show what the protobuf message costs: the tensor
is copied into the message, the message is serialised, parsed, and its content copied out again. A call that waits for its
tensor holds a thread of the server; beyond ``max_requests`` calls are refused, so a forgotten bound shows as an error
and never as a deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import grpc
import numpy as np

from runtime import wire
from runtime.deadline import Deadline
from runtime.errors import ChannelClosedError, CorruptMessageError, PeerLostError, ShapeError, VerbflowError
from runtime.future import Future, failed
from runtime.tensor import DTYPE_CODES, DTYPES_BY_CODE, MAX_RANK, TensorSpec, byte_view
from runtime.trace import Phase
from runtime.transport.base import Lease, TensorSource
from runtime.transport.grpc.connection import SERVICE, GrpcChannelBase, GrpcTransportBase, translate
from runtime.transport.grpc.tensor_pb2 import RecvTensorRequest, RecvTensorResponse, TensorProto
from runtime.transport.pending import Pending, encode_key

_ERROR = "verbflow-error-bin"
_METHOD = f"/{SERVICE}/RecvTensor"


def to_proto(array: np.ndarray) -> TensorProto:
    """A tensor as a message; copies the content. ShapeError if its dtype cannot travel."""
    spec = TensorSpec.of(array)
    contiguous = np.ascontiguousarray(array)
    return TensorProto(
        dtype=DTYPE_CODES[spec.dtype.name], dims=array.shape, tensor_content=byte_view(contiguous).tobytes()
    )


def spec_of(proto: TensorProto, content: bytes) -> TensorSpec:
    """Shape and dtype of a message; CorruptMessageError if its parts do not fit together."""
    dtype = DTYPES_BY_CODE.get(proto.dtype)
    if dtype is None or len(proto.dims) > MAX_RANK or any(size > wire.MAX_TENSOR_BYTES for size in proto.dims):
        raise CorruptMessageError(f"TensorProto of dtype code {proto.dtype} and {len(proto.dims)} dimensions is none")
    spec = TensorSpec(tuple(proto.dims), dtype)
    if spec.nbytes != len(content):
        raise CorruptMessageError(f"TensorProto of {spec} has {len(content)} bytes of content")
    return spec


class GrpcProtoTransport(GrpcTransportBase):
    """A unary call a fetch."""

    name = "grpc_proto"

    def handlers(self, source: TensorSource) -> dict[str, grpc.RpcMethodHandler]:
        def recv_tensor(request: RecvTensorRequest, context: grpc.ServicerContext) -> RecvTensorResponse:
            answer = _wait_for(source, request.rendezvous_key, context)
            if isinstance(answer, BaseException):
                _refuse(context, answer)
            start_ns = time.monotonic_ns()
            with answer as array:
                try:
                    response = RecvTensorResponse(tensor=to_proto(array))
                except ShapeError as error:
                    _refuse(context, error)
                nbytes, contiguous = array.nbytes, array.flags.c_contiguous
            with self.guard:
                self.served.served += 1
                self.served.copies += 2 * int(nbytes > 0) + int(not contiguous)
                self.served.bytes_out += nbytes
                self.served.messages_out += 1
            self.tracer.record(Phase.SERIALISE, request.rendezvous_key, 0, start_ns, time.monotonic_ns(), nbytes)
            return response

        def hello(request: bytes, context: grpc.ServicerContext) -> bytes:
            return request

        return {
            "Hello": grpc.unary_unary_rpc_method_handler(hello),
            "RecvTensor": grpc.unary_unary_rpc_method_handler(
                recv_tensor, RecvTensorRequest.FromString, RecvTensorResponse.SerializeToString
            ),
        }

    def threads(self) -> int:
        return self.settings.max_requests

    def channel(self, connection: grpc.Channel, peer: str) -> GrpcProtoChannel:
        return GrpcProtoChannel(self, connection, peer)


def _refuse(context: grpc.ServicerContext, error: BaseException) -> NoReturn:
    context.set_trailing_metadata(((_ERROR, wire.error_text(error)),))
    context.abort(grpc.StatusCode.ABORTED, "there is no such tensor")
    raise error  # not reached: abort raises


def _wait_for(source: TensorSource, key: str, context: grpc.ServicerContext) -> Lease | BaseException:
    """The source's answer; an error once the caller has given up or this end closes."""
    guard = threading.Lock()
    come = threading.Event()
    answers: list[Lease | BaseException] = []

    def settle(answer: Lease | BaseException) -> None:
        with guard:
            late = bool(answers)
            if not late:
                answers.append(answer)
        if late and isinstance(answer, Lease):
            answer.release()
        come.set()

    gone = PeerLostError("the fetch was given up")
    if not context.add_callback(lambda: settle(gone)):
        settle(gone)
    source.take(key, settle)
    # Ended by the callback at the latest: at the caller's deadline, its loss, or the server's stop.
    come.wait()
    return answers[0]


class GrpcProtoChannel(GrpcChannelBase[grpc.Future]):
    """One peer, any number of calls at a time. Answers are copied to their destination on gRPC's thread."""

    def __init__(self, transport: GrpcProtoTransport, connection: grpc.Channel, peer: str) -> None:
        super().__init__(transport, connection, peer)
        self._recv_tensor = connection.unary_unary(
            _METHOD, RecvTensorRequest.SerializeToString, RecvTensorResponse.FromString
        )

    def connect(self, deadline: Deadline) -> None:
        """Reach the peer's gate once."""
        probe = self._grpc.unary_unary(f"/{SERVICE}/Hello")
        try:
            probe(b"", timeout=deadline.remaining(), metadata=self._transport.credentials())
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise deadline.error(f"connection to {self.peer} over grpc_proto") from error
            raise translate(error, self.peer) from error

    def fetch(self, key: str, into: np.ndarray | None = None, *, deadline: Deadline) -> Future[np.ndarray]:
        encode_key(key)
        pending = Pending(key, into, deadline, f"fetch of {key} from {self.peer} over grpc_proto")
        if self._tracer.enabled:
            pending.asked_ns = time.monotonic_ns()
        with self._guard:
            if self._broken is not None:
                return failed(self._broken)
            self.counters.fetches += 1
            self.counters.messages_out += 1
            try:
                call = self._recv_tensor.future(
                    RecvTensorRequest(rendezvous_key=key),
                    timeout=deadline.remaining(),
                    metadata=self._transport.credentials(),
                )
            except ValueError as error:  # closed at this moment
                return failed(ChannelClosedError(str(error)))
            self._pending[call] = pending
        if pending.asked_ns:
            self._tracer.record(Phase.REQUEST, key, 0, pending.asked_ns, time.monotonic_ns())
        call.add_done_callback(self._done)
        return pending.future

    def _done(self, call: grpc.Future) -> None:
        with self._guard:
            pending = self._pending.pop(call, None)
        if pending is None:  # aborted
            return
        try:
            self._take(call, pending)
        except VerbflowError as error:
            pending.fail(error)
        except grpc.RpcError as error:
            pending.fail(self._failure(error, pending))

    def _take(self, call: grpc.Future, pending: Pending) -> None:
        tensor = call.result().tensor
        start_ns = time.monotonic_ns()
        content = tensor.tensor_content
        spec = spec_of(tensor, content)
        fresh = pending.write(spec, 0, memoryview(content), self._transport.arena)
        now_ns = time.monotonic_ns()
        with self._guard:
            self.counters.messages_in += 1
            if fresh >= 0:
                self.counters.bytes_in += spec.nbytes
                self.counters.allocations += fresh
                self.counters.copies += 2 * int(spec.nbytes > 0)
        if pending.asked_ns:
            self._tracer.record(Phase.WIRE, pending.key, 0, pending.asked_ns, start_ns, spec.nbytes)
            self._tracer.record(Phase.COPY, pending.key, 0, start_ns, now_ns, spec.nbytes)
        pending.complete()

    def _failure(self, error: grpc.RpcError, pending: Pending) -> BaseException:
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return pending.deadline.error(pending.future.what)
        if code is grpc.StatusCode.ABORTED:
            told = dict(error.trailing_metadata() or ()).get(_ERROR, b"")
            return wire.error_from_text(told.decode(errors="replace"), self.peer)
        failure = translate(error, self.peer)
        # The channel keeps the failure, which must not keep the frames here: their locals lead to the step's memory.
        failure.__cause__ = error.with_traceback(None)
        if isinstance(failure, PeerLostError):
            # gRPC would connect again by itself, perhaps to the peer's successor; to us the peer is lost.
            self.abort(failure)
        return failure

    def _stop(self, reason: BaseException, given_up: Sequence[grpc.Future]) -> None:
        for call in given_up:
            call.cancel()
