"""Files that were damaged, swapped or replaced after the export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.corpus.architecture import ARCHITECTURES, Architecture
from benchmarks.corpus.bench import Bench
from benchmarks.corpus.entry import in_file
from benchmarks.corpus.exporters import DIRECT_17, DYNAMO_18, EXTERNAL_18, TRACED_13, Export
from benchmarks.corpus.trained import build_trained


def _data_path(path: Path) -> Path:
    (data,) = path.parent.glob("*.data")
    return data


def _export_other_run(path: Path, architecture: Architecture) -> Path:
    """Export the model with the weights of another training run into a separate folder."""
    other_path = path.parent / "other" / path.name
    other_path.parent.mkdir()
    Export(build_trained(architecture, seed=1), architecture, EXTERNAL_18).write(
        other_path, external=True
    )
    return other_path


@in_file("truncated file", ("resnet", DIRECT_17))
def last_byte_missing(path: Path, _: Bench, __: Architecture) -> None:
    """Remove the last byte of the file."""
    path.write_bytes(path.read_bytes()[:-1])


@in_file("truncated file", ("vit", DYNAMO_18))
def half_a_file(path: Path, _: Bench, __: Architecture) -> None:
    """Truncate the file to its first half, as after a broken upload."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@in_file("truncated file", ("mobilenet", EXTERNAL_18))
def data_cut_short(path: Path, _: Bench, __: Architecture) -> None:
    """Remove the last kilobyte of the external data."""
    data = _data_path(path)
    data.write_bytes(data.read_bytes()[:-1024])


@in_file("no model", ("pooling", DIRECT_17))
def empty(path: Path, _: Bench, __: Architecture) -> None:
    """Write an empty file, as on a full disk."""
    path.write_bytes(b"")


@in_file("no model", ("tokens", DIRECT_17))
def garbage(path: Path, _: Bench, __: Architecture) -> None:
    """Write random bytes instead of a model."""
    path.write_bytes(np.random.default_rng(0).bytes(20_000))


@in_file("no model", ("recurrent", DIRECT_17))
def checkpoint_renamed(path: Path, bench: Bench, architecture: Architecture) -> None:
    """Write a PyTorch checkpoint with the file name of a model."""
    torch.save(bench.model(architecture).state_dict(), path)


@in_file("no model", ("points", DIRECT_17))
def pointer(path: Path, _: Bench, __: Architecture) -> None:
    """Write a Git LFS pointer instead of the file."""
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7000\n")


@in_file("swapped external data", ("resnet", EXTERNAL_18))
def data_of_another_run(path: Path, _: Bench, architecture: Architecture) -> None:
    """Replace the external data with that of another training run, which loads without an error."""
    shutil.copyfile(_data_path(_export_other_run(path, architecture)), _data_path(path))


@in_file("swapped external data", ("segmenter", EXTERNAL_18))
def data_missing(path: Path, _: Bench, __: Architecture) -> None:
    """Delete the external data."""
    _data_path(path).unlink()


@in_file("swapped external data", ("camera", EXTERNAL_18))
def data_zeroed(path: Path, _: Bench, __: Architecture) -> None:
    """Fill the external data with zeros, as after a sparse copy."""
    data = _data_path(path)
    data.write_bytes(bytes(data.stat().st_size))


@in_file("flipped bits", ("detector", EXTERNAL_18))
def one_bit(path: Path, _: Bench, __: Architecture) -> None:
    """Flip the highest mantissa bit of the largest weight."""
    data = _data_path(path)
    bits = np.frombuffer(data.read_bytes(), np.uint32).copy()
    values = np.abs(bits.view(np.float32))
    bits[np.nanargmax(np.where(values < 1e3, values, 0.0))] ^= np.uint32(1 << 22)
    data.write_bytes(bits.tobytes())


@in_file("stale digest", ("resnet", DIRECT_17))
def replaced_meanwhile(path: Path, _: Bench, architecture: Architecture) -> Callable[[], None]:
    """Replace the file with that of another training run during the measurement."""
    other_path = path.with_suffix(".other")
    Export(build_trained(architecture, seed=1), architecture, DIRECT_17).write(other_path)
    return lambda: other_path.replace(path) and None


@in_file("stale digest", ("pyramid", EXTERNAL_18))
def data_replaced_meanwhile(path: Path, _: Bench, architecture: Architecture) -> Callable[[], None]:
    """Replace the external data during the measurement, but not the model file."""
    other_path = _data_path(_export_other_run(path, architecture))
    return lambda: shutil.copyfile(other_path, _data_path(path)) and None


@in_file("another model", ("mobilenet", DIRECT_17))
def of_another_architecture(path: Path, bench: Bench, _: Architecture) -> None:
    """Write the file of another architecture with the same inputs and outputs."""
    bench.write(ARCHITECTURES["resnet"], TRACED_13, path)
