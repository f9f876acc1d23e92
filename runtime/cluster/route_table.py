"""RouteTable: which transport joins which two tasks, as a master has agreed on it with both."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from runtime.cluster.proto import control_pb2 as pb
from runtime.cluster.routes import AUTO, choose
from runtime.deadline import Deadline
from runtime.errors import ConfigError

_LOG = logging.getLogger("verbflow.cluster")

Route = tuple[str, str]  # the transport's name, and why it is that one


class CallAll(Protocol):
    """One control call at several tasks at the same time; the answers by task, or the first error."""

    def __call__(self, method: str, requests: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]: ...


class RouteTable:
    """What was agreed on is kept, so a pair of incarnations is not asked again. Any thread may call."""

    def __init__(self, call_all: CallAll) -> None:
        self._call_all = call_all
        self._resolved: dict[tuple[str, int, str, int], Route] = {}

    def of(
        self,
        pairs: Collection[frozenset[str]],
        peers: Mapping[str, pb.Peer],
        policies: Mapping[str, str],
        deadline: Deadline,
    ) -> dict[frozenset[str], Route]:
        """Routes of ``pairs`` of tasks, of whom ``peers`` and ``policies`` (how they were started) say more.

        ConfigError if two tasks were told to use different transports; UnavailableError says why none fits.
        """
        keys = {}
        for pair in pairs:
            first, second = sorted(pair)
            keys[pair] = (first, peers[first].incarnation, second, peers[second].incarnation)
        missing = [pair for pair in pairs if keys[pair] not in self._resolved]
        if missing:
            asked: dict[str, pb.ResolveRequest] = {}
            for pair in missing:
                first, second = sorted(pair)
                _check_policies(first, second, policies)
                for one, other in ((first, second), (second, first)):
                    asked.setdefault(one, pb.ResolveRequest()).peers.append(peers[other])
            answers = self._call_all("ResolvePeers", asked, deadline)
            for pair in missing:
                first, second = sorted(pair)
                ends = answers[first].by_peer[second], answers[second].by_peer[first]
                name, why = choose(*ends, f"{first} and {second}")
                _LOG.info("%s and %s use %s: %s", first, second, name, why)
                self._resolved[keys[pair]] = (name, why)
        return {pair: self._resolved[keys[pair]] for pair in pairs}

    def known(self) -> dict[tuple[str, str], Route]:
        """All that was agreed on so far, by the two tasks' names in order."""
        return {(first, second): route for (first, _, second, _), route in list(self._resolved.items())}


def _check_policies(first: str, second: str, policies: Mapping[str, str]) -> None:
    chosen = policies[first], policies[second]
    if chosen[0] != chosen[1] and AUTO not in chosen:
        raise ConfigError(f"{first} was started with transport {chosen[0]}, {second} with {chosen[1]}")
