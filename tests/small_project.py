"""A user's project for `gate check`: module, weights, exported files and samples.

It is outside the repository, so that everything must be found from the current folder.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from gate.export.export import export_model
from gate.model.checkpoint import save_checkpoint
from gate.model.loading import build_model
from gate.records.export import ExportSettings

MODULE = '''
import torch
from torch import nn


def build(channels=1):
    """Five classes of 8x8 images."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Linear(4 * 36, 5))


def coloured():
    return build(3)


class Field(nn.Module):
    """Two inputs, an image as output: no classes anywhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, image, scale):
        return self.conv(image) * scale


def field():
    return Field()


def leave():
    import sys

    sys.exit(0)


def talk():
    print("a library that prints on stdout")
    return build()


def talk_in_c():
    import ctypes

    ctypes.CDLL(None).printf(b"a library in C that prints on stdout\\n")
    return build()


def broken():
    raise RuntimeError("no weights here")
'''
SAMPLES = 64


@functools.cache
def create_project() -> Path:
    """Return the project's folder, which is created once per process and removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="gate-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return fill_project(folder)


def fill_project(folder: Path) -> Path:
    """Write the project into `folder`, which is created if missing."""
    folder.mkdir(exist_ok=True)
    (folder / "small_models.py").write_text(MODULE)
    with contextlib.chdir(folder):
        _fill(folder)
    return folder


def _fill(folder: Path) -> None:
    images = np.random.default_rng(0).normal(size=(SAMPLES, 1, 8, 8)).astype(np.float32)
    model = build_model("small_models:build").eval()
    with torch.no_grad():
        labels = model(torch.from_numpy(images)).argmax(1).numpy()
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    _export(model, {"input": images[:4]}, folder / "good.onnx", ("logits",))
    change_one_weight(folder / "good.onnx", folder / "bad.onnx")
    save_checkpoint(model, folder / "weights.safetensors")
    _coloured(folder)
    _two_inputs(folder, images)
    _bad_inputs(folder, images)


def _coloured(folder: Path) -> None:
    images = np.random.default_rng(2).normal(size=(SAMPLES, 3, 8, 8)).astype(np.float32)
    np.save(folder / "coloured.npy", images)
    model = build_model("small_models:coloured").eval()
    _export(model, {"input": images[:4]}, folder / "coloured.onnx", ("logits",))


def _two_inputs(folder: Path, images: np.ndarray) -> None:
    scale = np.random.default_rng(1).uniform(1, 2, size=(SAMPLES, 1, 1, 1)).astype(np.float32)
    np.savez(folder / "field.npz", image=images, scale=scale)
    example = {"image": images[:4], "scale": scale[:4]}
    _export(build_model("small_models:field").eval(), example, folder / "field.onnx", ("field",))


def _bad_inputs(folder: Path, images: np.ndarray) -> None:
    tampered_file = images.copy()
    tampered_file[40, 0, 2, 2] = np.nan
    np.save(folder / "nan.npy", tampered_file)
    np.save(folder / "rank.npy", images[:, 0])
    np.save(folder / "size.npy", images[..., :7])
    np.save(folder / "double.npy", images.astype(np.float64))
    np.save(folder / "none.npy", images[:0])
    np.savez(folder / "two.npz", input=images, other=images)
    np.save(folder / "short_labels.npy", np.zeros(SAMPLES - 1, dtype=np.int64))
    np.save(folder / "far_labels.npy", np.full(SAMPLES, 99))
    (folder / "empty").mkdir()
    (folder / "text.onnx").write_text("this is no model")
    complete = (folder / "good.onnx").read_bytes()
    (folder / "cut.onnx").write_bytes(complete[: len(complete) // 2])
    torch.save(nn.Linear(3, 2).state_dict(), folder / "other.pt")
    torch.save(_MaliciousPickle(), folder / "evil.pt")


class _MaliciousPickle:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("evil_ran"),)


def _export(
    model: nn.Module, example: dict[str, np.ndarray], path: Path, outputs: tuple[str, ...]
) -> None:
    settings = ExportSettings(
        strategy="traced", batch_size=4, input_names=tuple(example), output_names=outputs
    )
    export_model(model, example, settings=settings, output=path)


def change_one_weight(source: Path, target: Path) -> None:
    """Copy an ONNX file, with one weight of its last layer multiplied by 1.5."""
    model = onnx.load(source)
    weight = next(t for t in model.graph.initializer if len(t.dims) == 2)
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] *= 1.5
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, target)
