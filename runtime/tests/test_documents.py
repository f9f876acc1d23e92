"""The examples in the documentation run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import runtime

ROOT = Path(__file__).resolve().parents[2]


def python_blocks(name: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_worked_example_of_the_runtime_runs(tmp_path: Path) -> None:
    (example,) = python_blocks("runtime.md")
    assert 15 <= len([line for line in example.splitlines() if line.strip()]) <= 30
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "after step 200" in done.stdout and "grpc" in done.stdout
    loss = float(done.stdout.split()[1])
    assert loss < 0.5
    assert done.stderr == ""


def test_the_public_names_are_there_and_say_what_they_are() -> None:
    for name in runtime.__all__:
        assert getattr(runtime, name).__doc__, name
    assert "lenet" in runtime.models.names() and runtime.models.build("mlp", 2, graph=runtime.Graph()).batch == 2
    with pytest.raises(AttributeError, match="module 'runtime' has no attribute 'Sesion'"):
        runtime.Sesion  # noqa: B018
