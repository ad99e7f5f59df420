"""The judged files: a trained network, its exports, some with a fault, and policies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from ruamel.yaml import YAML
from torch import nn

from benchmarks.screens import digits
from gate.export.export import export_model
from gate.model.checkpoint import save_checkpoint
from gate.policy.policy import Policy
from gate.policy.sections import ChampionPolicy, PreprocessingPolicy
from gate.preprocess import implementations
from gate.preprocess.spec import PreprocessSpec, Resize
from gate.records.evidence import Source
from gate.records.export import ExportSettings
from gate.storage.digest import Digest

SPEC = PreprocessSpec(
    resize=Resize(size=(digits.SIDE, digits.SIDE)), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
)
PHOTOGRAPHS = 60


def lay_out(folder: Path) -> None:
    """Train, export, spoil; write everything that the commands of the scene read into `folder`."""
    shutil.copy(digits.__file__, folder / "digits.py")
    shown, labels = digits.pictures()
    inputs = np.stack([implementations.pillow_preprocess(one, SPEC) for one in shown])
    held = digits.EVALUATED
    np.save(folder / "samples.npy", inputs[-held:])
    np.save(folder / "labels.npy", labels[-held:])
    np.save(folder / "one-digit.npy", np.repeat(inputs[-1:], held, axis=0))
    np.save(folder / "one-label.npy", np.repeat(labels[-1:], held, axis=0))
    digits.save_pictures(folder / "scans", shown[-PHOTOGRAPHS:])
    SPEC.save(folder / "preprocessing.json")
    known = inputs[:-held], labels[:-held]
    first = digits.train(digits.network(), *known, epochs=4)
    _save(folder, "first", first, inputs)
    second = digits.train(digits.network(), *known, epochs=9)
    _save(folder, "second", second, inputs)
    third = digits.train(digits.gelu_network(), *known, epochs=4)
    _save(folder, "gelu", third, inputs, factory="digits:gelu_network")
    _spoil(folder / "second.onnx", folder / "half.onnx", half_a_layer)
    for name, policy in _policies().items():
        YAML(typ="safe").dump({"gate": policy.to_plain()}, folder / f"{name}.yaml")


def half_a_layer(model: onnx.ModelProto) -> None:
    """The weights of one layer went through half precision."""
    tensor = next(one for one in model.graph.initializer if one.name == "layer3.conv2.weight")
    rounded = numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))


def _save(
    folder: Path,
    name: str,
    model: nn.Module,
    inputs: NDArray[np.float32],
    *,
    factory: str = "digits:network",
) -> None:
    checkpoint = folder / f"{name}.safetensors"
    save_checkpoint(model, checkpoint)
    source = Source(
        factory=factory,
        checkpoint_sha256=Digest.from_file(checkpoint),
        preprocess_sha256=SPEC.digest(),
    )
    settings = ExportSettings()
    export_model(
        model, {"input": inputs[:4]}, settings=settings, output=folder / f"{name}.onnx",
        source=source,
    )  # fmt: skip


def _spoil(source: Path, target: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(source)
    change(model)
    onnx.save(model, target)


def _policies() -> dict[str, Policy]:
    """By the name of their file."""
    default = Policy.default(task="classification")
    further: dict[str, Any] = {
        "top1_lower_bound": 0.99, "confidence_diff": 1e-4, "accuracy_drop": 0.0,
        "max_abs_diff": 1e-3,
    }  # fmt: skip
    runtimes = {
        name: runtime.model_copy(update={"bounds": runtime.bounds.model_copy(update=further)})
        for name, runtime in default.runtimes.items()
    }
    plain = default.model_copy(update={"runtimes": runtimes, "min_samples": 400})
    against = ChampionPolicy(max_accuracy_drop=0.02, min_agreement=0.9)
    browser = PreprocessingPolicy(consumers=("opencv", "torchvision"))
    return {
        "policy": plain,
        "reviewed": plain.model_copy(update={"incumbent": against, "review": "required"}),
        "consumers": plain.model_copy(update={"preprocessing": browser}),
    }
