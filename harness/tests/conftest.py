"""The same rules as for the runtime's tests."""

from __future__ import annotations

import pytest

from runtime.tests.conftest import grpc_is_warm, no_leaks, pytest_collection_modifyitems

__all__ = ["grpc_is_warm", "no_leaks", "pytest_collection_modifyitems"]


@pytest.fixture(scope="session", autouse=True)
def matplotlib_is_warm() -> None:
    """Matplotlib keeps the files of fonts open that it has used once; that is no leak of the first test that draws."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from harness.plots import palette

    with plt.style.context(palette.STYLE):
        figure, ax = plt.subplots()
        ax.loglog([1, 10], [1, 10])
        ax.set_title("bold")
        ax.set_xlabel("$mathematical$", style="italic")
        figure.savefig(io.BytesIO())
        plt.close(figure)
