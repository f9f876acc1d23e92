"""The same rules as for the runtime's tests."""

from __future__ import annotations

from runtime.tests.conftest import grpc_is_warm, no_leaks, pytest_collection_modifyitems

__all__ = ["grpc_is_warm", "no_leaks", "pytest_collection_modifyitems"]
