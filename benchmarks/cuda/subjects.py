"""The models of the matrix: the pipeline's digits model, two of torchvision, a transformer with two
inputs, and unusual ones. Weights are random from fixed seeds; nothing is downloaded."""

from __future__ import annotations

import numpy as np
from torch import nn
from torchvision import models

from benchmarks.corpus import samples
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.cuda.odd_nets import Grouped, Recurrent, TwoTexts, Volumes
from benchmarks.torchvision_models import calibrated, images
from gate.model.loading import torchvision_model

DIGITS_SIDE, DIGITS_CLASSES = 64, 10
"""As params.yaml has them."""
_CALIBRATION = 16


def _digits() -> nn.Module:
    return torchvision_model("resnet18", weights=None, num_classes=DIGITS_CLASSES)


def _texts(count: int, seed: int) -> Arrays:
    tokens = samples.tokens(count, 48, vocabulary=500, seed=seed)
    return {"tokens": tokens, "mask": (tokens != 0).astype(np.int64)}


def _calibrated(model: nn.Module, _architecture: Architecture, arrays: Arrays) -> None:
    calibrated(model, np.asarray(arrays["input"][:_CALIBRATION], np.float32))


def _of_torchvision(name: str) -> Architecture:
    return Architecture(
        name,
        lambda: models.get_model(name, weights=None),
        lambda n, seed: {"input": images(n, name, seed=seed)},
        settle=_calibrated,
        count=8,  # as in benchmarks.torchvision_sweep: their float64 truth takes long
        batch_size=4,
    )


MODELS: dict[str, Architecture] = {
    one.name: one
    for one in (
        Architecture(
            "digits",
            _digits,
            lambda n, seed: {"input": samples.normalised(n, DIGITS_SIDE, seed=seed)},
        ),
        Architecture("two-texts", TwoTexts, _texts, axes={n: {1: "length"} for n in _texts(1, 0)}),
        Architecture(
            "grouped", Grouped, lambda n, seed: {"input": samples.normalised(n, 48, seed=seed)}
        ),
        Architecture(
            "recurrent",
            Recurrent,
            lambda n, seed: {"series": samples.series(n, 40, 12, seed=seed)},
            axes={"series": {1: "length"}},
        ),
        Architecture(
            "volumes",
            Volumes,
            lambda n, seed: {
                "volume": samples.normalised(n, 32, seed=seed)[:, :1, None]
                * np.linspace(0.5, 1.5, 8, dtype=np.float32)[:, None, None]
            },
        ),
        *map(_of_torchvision, ("resnet50", "vit_b_16")),
    )
}
