"""The PyTorch model of params.yaml, built the same way in every stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gate.errors import DataError
from pipelines import paths
from pipelines.params import ModelParams

if TYPE_CHECKING:
    from torch import nn

    from gate.storage.digest import Digest


def build(params: ModelParams) -> nn.Module:
    """Build the architecture with its pretrained weights, or call the factory.

    Seed torch first, because layers without pretrained weights are random. Raises ModelError.
    """
    from gate.model.loading import build_model, torchvision_model

    if params.factory is not None:
        return build_model(params.factory)
    assert params.architecture is not None  # ensured by ModelParams
    return torchvision_model(
        params.architecture, weights=params.weights, num_classes=params.num_classes
    )


def load_trained_model(params: ModelParams) -> tuple[nn.Module, Digest]:
    """Return the model with the trained checkpoint in eval mode, and the checkpoint's digest."""
    from gate.model.checkpoint import load_checkpoint

    model = build(params)
    model.eval()  # not chained: a model's own train() may return nothing
    return model, load_checkpoint(model, paths.CHECKPOINT)


def reference() -> nn.Module:
    """Build the trained model. Workers use this function as their factory. Raises as
    `load_trained_model`."""
    return load_trained_model(ModelParams.load())[0]


def check_labels(labels: np.ndarray, classes: int, *, split: str) -> None:
    """Raise DataError if a label is not one of the model's classes."""
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"the {split} labels reach from {labels.min()} to {labels.max()}, the model has "
            f"{classes} classes (0 to {classes - 1}). Set model.num_classes to the number of "
            "classes in data/manifest.json, or use labels of this model."
        )
