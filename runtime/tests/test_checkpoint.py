"""Checkpoints: whole or not at all, verified on load, readable by other tools."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import CheckpointError
from runtime.tensor import TensorSpec
from runtime.training.checkpoint import (
    Checkpoint,
    checkpoint_path,
    keep_last,
    latest_checkpoint,
    list_checkpoints,
    write_checkpoint,
)


def variables() -> dict[str, np.ndarray]:
    return {
        "fc/weights": np.arange(4000, dtype=np.float32).reshape(40, 100),
        "fc/biases": np.linspace(-1, 1, 100),
        "global_step": np.array(17, np.int64),
        "empty": np.zeros((0, 3), np.float32),
    }


def write(path: Path, step: int = 17, change: dict[str, np.ndarray] | None = None) -> None:
    values = {**variables(), **(change or {})}
    specs = {name: TensorSpec.of(array) for name, array in variables().items()}
    write_checkpoint(path, step, specs, values.items())


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 17)
    write(path)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.step == 17
        read = dict(checkpoint.variables())
    assert read.keys() == variables().keys()
    for name, array in variables().items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_other_tools_can_open_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    path = checkpoint_path(tmp_path, 1)
    write(path)
    loaded = safetensors.load_file(path)
    for name, array in variables().items():
        np.testing.assert_array_equal(loaded[name], array)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = checkpoint_path(tmp_path, 1)
    write(path)
    os.truncate(path, cut if cut >= 0 else path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"damaged"):
        Checkpoint(path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    write(path)
    content = bytearray(path.read_bytes())
    content[-200] ^= 4
    path.write_bytes(content)
    with Checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=r"another checksum"):
        checkpoint.verify()


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (16).to_bytes(8, "little") + b'{"a": {"b": 1}} '])
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    path = checkpoint_path(tmp_path, 1)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged"):
        Checkpoint(path)


def test_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        write(checkpoint_path(tmp_path, step), step)
    newest = checkpoint_path(tmp_path, 100)
    os.truncate(newest, newest.stat().st_size // 2)
    assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 20)
    for step in (5, 20):
        os.truncate(checkpoint_path(tmp_path, step), 9)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        latest_checkpoint(tmp_path)


def test_none_yet_is_no_error(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write(checkpoint_path(tmp_path, step), step)
    (tmp_path / ".step-000000000009.safetensors.abc").write_bytes(b"left by a killed writer")
    keep_last(tmp_path, 2)
    assert list_checkpoints(tmp_path) == [checkpoint_path(tmp_path, 10), checkpoint_path(tmp_path, 3)]
    assert sorted(os.listdir(tmp_path)) == ["step-000000000003.safetensors", "step-000000000010.safetensors"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"fc/biases float32\[7\] was not expected \(float64\[100\]\)"):
        write(path, change={"fc/biases": np.zeros(7, np.float32)})
    specs = {name: TensorSpec.of(array) for name, array in variables().items()}
    with pytest.raises(CheckpointError, match=r"no content for .*fc/weights"):
        write_checkpoint(path, 3, specs, [("empty", np.zeros((0, 3), np.float32))])
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"cannot be written"):
        write(tmp_path / "file" / "step-000000000001.safetensors")


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    write(path)
    specs = {name: TensorSpec.of(array) for name, array in variables().items()}
    with Checkpoint(path) as checkpoint:
        checkpoint.check_model(specs)
        with pytest.raises(CheckpointError, match=r"another model: fc/weights: float32\[40, 100\] here, float32\[2\]"):
            checkpoint.check_model({**specs, "fc/weights": TensorSpec((2,), np.dtype("float32"))})
