"""Errors of the harness that do not belong to the runtime, so that old results open without it."""

from __future__ import annotations


class HarnessError(Exception):
    """Root of what the harness raises on purpose; the message is a sentence for the person at the terminal."""


class DefinitionError(HarnessError, ValueError):
    """An experiment, axis, option or quantity that cannot be; the message names file, key and what is allowed."""


class RecordError(HarnessError):
    """A stored result cannot be read, or a new one cannot be written; the message names the file."""


class BusyError(HarnessError):
    """Another process works on the same run."""
