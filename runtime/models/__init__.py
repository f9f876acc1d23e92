"""Networks to train: ``models.build(name, batch)`` builds one of ``models.names()`` into the current graph."""

from runtime.models.catalog import architecture, build, manifest, names

__all__ = ["architecture", "build", "manifest", "names"]
