"""Write the checked files: trained networks, their exports, some with a fault, and policies."""

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


def write_files(folder: Path) -> None:
    """Train, export and edit the models, and write all inputs of the scene into `folder`."""
    shutil.copy(digits.__file__, folder / "digits.py")
    images, labels = digits.pictures()
    inputs = np.stack([implementations.pillow_preprocess(image, SPEC) for image in images])
    evaluated = digits.EVALUATED
    np.save(folder / "samples.npy", inputs[-evaluated:])
    np.save(folder / "labels.npy", labels[-evaluated:])
    np.save(folder / "one-digit.npy", np.repeat(inputs[-1:], evaluated, axis=0))
    np.save(folder / "one-label.npy", np.repeat(labels[-1:], evaluated, axis=0))
    digits.save_pictures(folder / "scans", images[-PHOTOGRAPHS:])
    SPEC.save(folder / "preprocessing.json")
    training_data = inputs[:-evaluated], labels[:-evaluated]
    first = digits.train(digits.network(), *training_data, epochs=4)
    _save(folder, "first", first, inputs)
    second = digits.train(digits.network(), *training_data, epochs=9)
    _save(folder, "second", second, inputs)
    third = digits.train(digits.gelu_network(), *training_data, epochs=4)
    _save(folder, "gelu", third, inputs, factory="digits:gelu_network")
    _edit_file(folder / "second.onnx", folder / "half.onnx", round_layer_to_float16)
    for name, policy in _policies().items():
        YAML(typ="safe").dump({"gate": policy.to_plain()}, folder / f"{name}.yaml")


def round_layer_to_float16(model: onnx.ModelProto) -> None:
    """Round the weights of one layer to float16."""
    tensor = next(
        tensor for tensor in model.graph.initializer if tensor.name == "layer3.conv2.weight"
    )
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


def _edit_file(source: Path, target: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(source)
    change(model)
    onnx.save(model, target)


def _policies() -> dict[str, Policy]:
    """Return the policies by file name."""
    default = Policy.default(task="classification")
    extra_bounds: dict[str, Any] = {
        "top1_lower_bound": 0.99, "confidence_diff": 1e-4, "accuracy_drop": 0.0,
        "max_abs_diff": 1e-3,
    }  # fmt: skip
    runtimes = {
        name: runtime.model_copy(update={"bounds": runtime.bounds.model_copy(update=extra_bounds)})
        for name, runtime in default.runtimes.items()
    }
    policy = default.model_copy(update={"runtimes": runtimes, "min_samples": 400})
    champion = ChampionPolicy(max_accuracy_drop=0.02, min_agreement=0.9)
    preprocessing = PreprocessingPolicy(consumers=("opencv", "torchvision"))
    return {
        "policy": policy,
        "reviewed": policy.model_copy(update={"incumbent": champion, "review": "required"}),
        "consumers": policy.model_copy(update={"preprocessing": preprocessing}),
    }
