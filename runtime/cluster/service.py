"""The gRPC face of a Worker: authentication, errors that keep their class, and the step's end when its caller dies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from runtime.cluster.messages import check_size, chunks, pack, unpack, variables
from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.proto import control_pb2_grpc
from runtime.cluster.rpc import Gate, Tls, abort, described, error_named, server_options
from runtime.cluster.worker import Worker
from runtime.deadline import Deadline
from runtime.errors import PeerLostError, TransportError

_LOG = logging.getLogger("verbflow.cluster")
# A step holds one thread for as long as it runs, and a parameter server runs one step for each worker at a time.
MAX_CALLS = 256
_MAX_TIMEOUT_S = 24 * 3600.0


class ControlServer:
    """Serves ``worker`` on ``address`` (host:port) until closed. TransportError if it cannot listen there."""

    def __init__(self, worker: Worker, address: str, token: str, tls: Tls | None = None) -> None:
        self._pool = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="verbflow-control")
        self._server = grpc.server(
            self._pool, interceptors=(Gate(token, worker.task),), options=server_options(), maximum_concurrent_rpcs=None
        )
        control_pb2_grpc.add_WorkerServicer_to_server(_Service(worker), self._server)
        try:
            if tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, tls.server_credentials())
        except RuntimeError as error:
            self._pool.shutdown()
            raise TransportError(f"{worker.task} cannot listen on {address}: is it in use? ({error})") from error
        assert bound, address
        self._server.start()

    def close(self) -> None:
        """Stop serving; running calls are cancelled after a second. Idempotent."""
        self._server.stop(1.0).wait()
        self._pool.shutdown()


class _Service(control_pb2_grpc.WorkerServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def GetStatus(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        return _guarded(context, self._worker.status, request)

    def ResolvePeers(self, request: pb.ResolveRequest, context: grpc.ServicerContext) -> pb.ResolveReply:
        return _guarded(context, self._worker.resolve, request)

    def RegisterGraph(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:
        return _guarded(context, self._worker.register, request)

    def BindEdges(self, request: pb.BindRequest, context: grpc.ServicerContext) -> pb.Empty:
        _guarded(context, self._worker.bind, request, _deadline(context))
        return pb.Empty()

    def RunGraph(
        self, request_iterator: Iterator[pb.RunRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.RunReply]:
        running = [0]

        def gone() -> None:
            # A master that died breaks its calls; its step must not wait for anybody then.
            if running[0]:
                self._worker.abort(running[0], PeerLostError("the master of the step went away"))

        if not context.add_callback(gone):
            return
        try:
            for request in request_iterator:
                running[0] = request.step
                reply = self._run(request)
                running[0] = 0
                yield reply
        except grpc.RpcError:
            return  # the caller went away

    def _run(self, request: pb.RunRequest) -> pb.RunReply:
        try:
            if request.finished:
                self._worker.cleanup(list(request.finished))
            feeds = [unpack(tensor) for tensor in request.feeds]
            deadline = Deadline.after(min(request.timeout_s, _MAX_TIMEOUT_S))
            fetches = self._worker.run(request.handle, request.step, request.generation, feeds, deadline)
            check_size(fetches, "fetches")
            return pb.RunReply(fetches=[pack(array) for array in fetches])
        except Exception as error:  # whatever it is, the master has to know
            name, reason = described(error)
            return pb.RunReply(error=name, reason=reason)

    def AbortStep(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.Empty:
        _guarded(context, self._worker.abort, request.step, error_named(request.error, request.reason))
        return pb.Empty()

    def CleanupGraph(self, request: pb.CleanupRequest, context: grpc.ServicerContext) -> pb.Empty:
        _guarded(context, self._worker.cleanup, list(request.steps))
        return pb.Empty()

    def DeregisterGraph(self, request: pb.DeregisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        _guarded(context, self._worker.deregister, request.session, list(request.handles))
        return pb.Empty()

    def Ping(self, request: pb.PingRequest, context: grpc.ServicerContext) -> pb.PingReply:
        return _guarded(context, self._worker.ping, request)

    def ListVariables(self, request: pb.VariablesRequest, context: grpc.ServicerContext) -> pb.VariablesReply:
        return pb.VariablesReply(nbytes=_guarded(context, self._worker.variables, request.container))

    def SaveVariables(self, request: pb.SaveRequest, context: grpc.ServicerContext) -> Iterator[pb.VariableChunk]:
        try:
            for name, array in self._worker.save(request.container, list(request.names)):
                yield from chunks(request.container, name, array)
        except Exception as error:
            _refuse(context, error)

    def RestoreVariables(self, request_iterator: Iterator[pb.VariableChunk], context: grpc.ServicerContext) -> pb.Empty:
        try:
            values: dict[str, dict[str, np.ndarray]] = {}
            for container, name, array in variables(request_iterator):
                values.setdefault(container, {})[name] = array
            for container, arrays in values.items():
                self._worker.restore(arrays, container)
        except grpc.RpcError:
            pass  # the caller went away: there is nobody to answer
        except Exception as error:
            _refuse(context, error)
        return pb.Empty()

    def CollectTrace(self, request: pb.TraceRequest, context: grpc.ServicerContext) -> pb.TraceReply:
        return _guarded(context, self._worker.trace, request)

    def Shutdown(self, request: pb.ShutdownRequest, context: grpc.ServicerContext) -> pb.Empty:
        _LOG.info("%s: shutdown asked for: %s", self._worker.task, request.reason)
        self._worker.request_shutdown()
        return pb.Empty()


def _guarded(context: grpc.ServicerContext, method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return method(*arguments)
    except Exception as error:
        _refuse(context, error)
        raise


def _refuse(context: grpc.ServicerContext, error: Exception) -> None:
    abort(context, error)


def _deadline(context: grpc.ServicerContext) -> Deadline:
    remaining = context.time_remaining()
    return Deadline.after(min(remaining if remaining is not None else _MAX_TIMEOUT_S, _MAX_TIMEOUT_S))
