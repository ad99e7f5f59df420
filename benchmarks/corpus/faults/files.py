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
from benchmarks.corpus.trained import trained


def _data(path: Path) -> Path:
    (data,) = path.parent.glob("*.data")
    return data


def _of_another_run(path: Path, architecture: Architecture) -> Path:
    """The same model with the weights of another training, in a folder of its own."""
    other = path.parent / "other" / path.name
    other.parent.mkdir()
    Export(trained(architecture, seed=1), architecture, EXTERNAL_18).write(other, external=True)
    return other


@in_file("truncated file", ("resnet", DIRECT_17))
def last_byte_missing(path: Path, _: Bench, __: Architecture) -> None:
    """The last byte is missing."""
    path.write_bytes(path.read_bytes()[:-1])


@in_file("truncated file", ("vit", DYNAMO_18))
def half_a_file(path: Path, _: Bench, __: Architecture) -> None:
    """A broken upload: the first half of the file."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@in_file("truncated file", ("mobilenet", EXTERNAL_18))
def data_cut_short(path: Path, _: Bench, __: Architecture) -> None:
    """The last kilobyte of the external data is missing."""
    data = _data(path)
    data.write_bytes(data.read_bytes()[:-1024])


@in_file("no model", ("pooling", DIRECT_17))
def empty(path: Path, _: Bench, __: Architecture) -> None:
    """The disk was full: the file is there and empty."""
    path.write_bytes(b"")


@in_file("no model", ("tokens", DIRECT_17))
def garbage(path: Path, _: Bench, __: Architecture) -> None:
    """Random bytes in the place of a model."""
    path.write_bytes(np.random.default_rng(0).bytes(20_000))


@in_file("no model", ("recurrent", DIRECT_17))
def checkpoint_renamed(path: Path, bench: Bench, architecture: Architecture) -> None:
    """A PyTorch checkpoint with the name of a model."""
    torch.save(bench.model(architecture).state_dict(), path)


@in_file("no model", ("points", DIRECT_17))
def pointer(path: Path, _: Bench, __: Architecture) -> None:
    """Git LFS's pointer in place of the file."""
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7000\n")


@in_file("swapped external data", ("resnet", EXTERNAL_18))
def data_of_another_run(path: Path, _: Bench, architecture: Architecture) -> None:
    """The external data of another training lies beside the model; it loads without a word."""
    shutil.copyfile(_data(_of_another_run(path, architecture)), _data(path))


@in_file("swapped external data", ("segmenter", EXTERNAL_18))
def data_missing(path: Path, _: Bench, __: Architecture) -> None:
    """The external data was not copied along."""
    _data(path).unlink()


@in_file("swapped external data", ("camera", EXTERNAL_18))
def data_zeroed(path: Path, _: Bench, __: Architecture) -> None:
    """A sparse copy: the external data has its length and holds zeros."""
    data = _data(path)
    data.write_bytes(bytes(data.stat().st_size))


@in_file("flipped bits", ("detector", EXTERNAL_18))
def one_bit(path: Path, _: Bench, __: Architecture) -> None:
    """One bit of the weights is flipped: the highest of the mantissa, of the largest number."""
    data = _data(path)
    bits = np.frombuffer(data.read_bytes(), np.uint32).copy()
    values = np.abs(bits.view(np.float32))
    bits[np.nanargmax(np.where(values < 1e3, values, 0.0))] ^= np.uint32(1 << 22)
    data.write_bytes(bits.tobytes())


@in_file("stale digest", ("resnet", DIRECT_17))
def replaced_meanwhile(path: Path, _: Bench, architecture: Architecture) -> Callable[[], None]:
    """The file is replaced by that of another training while it is measured."""
    other = path.with_suffix(".other")
    Export(trained(architecture, seed=1), architecture, DIRECT_17).write(other)
    return lambda: other.replace(path) and None


@in_file("stale digest", ("pyramid", EXTERNAL_18))
def data_replaced_meanwhile(path: Path, _: Bench, architecture: Architecture) -> Callable[[], None]:
    """The external data is replaced while the file is measured; the model file is the same."""
    other = _data(_of_another_run(path, architecture))
    return lambda: shutil.copyfile(other, _data(path)) and None


@in_file("another model", ("mobilenet", DIRECT_17))
def of_another_architecture(path: Path, bench: Bench, _: Architecture) -> None:
    """The file of another architecture; inputs and outputs are the same."""
    bench.write(ARCHITECTURES["resnet"], TRACED_13, path)
