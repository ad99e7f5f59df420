"""Build torchvision's classification architectures with weights that behave like trained ones.

The benchmark runs without downloads, so pretrained weights are not available. Initial weights prove
little: untrained BatchNorm divides by one, some heads are all zero, ConvNeXt's blocks are scaled by
1e-6, and nearly every random network predicts one class for all images. `build` corrects only these
four.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import interpolate
from torchvision import models

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.corpus.trained import calibrate, center_logits

SIDE = {"inception_v3": 299}
"""Side length of the images in pixels, for architectures that don't take 224."""
_WARN_WITHOUT_INIT = ("googlenet", "inception_v3")
"""Architectures that warn unless `init_weights` is set."""
_CALIBRATION_SEED = 1
_CALIBRATION_IMAGES = 16


def architectures(*, below: int) -> dict[str, int]:
    """Return the name and number of parameters of each architecture with fewer than `below`.

    Sorted by size. The counts are those of torchvision, without auxiliary heads.
    """
    counts = {
        name: int(models.get_model_weights(name).DEFAULT.meta["num_params"])
        for name in models.list_models(module=models)
    }
    return {n: counts[n] for n in sorted(counts, key=counts.__getitem__) if counts[n] < below}


def images(count: int, name: str, *, seed: int, side: int | None = None) -> NDArray[np.float32]:
    """Return random images, shape (count, 3, side, side): a smooth field with a little noise each.

    All images have the same scale. A random network calibrated on 16 images has rounding errors of
    up to a percent on an outlier, in PyTorch as much as in the runtime. Such an error says nothing
    about the export.
    """
    side = side or SIDE.get(name, 224)
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 8, 8, generator=rng)
    smooth = interpolate(coarse, size=(side, side), mode="bilinear")
    smoothed = smooth + 0.3 * torch.randn(count, 3, side, side, generator=rng)
    return np.asarray((smoothed / smoothed.std()).numpy())


def build(name: str, *, seed: int = 0, side: int | None = None, **options: Any) -> nn.Module:
    """Build the architecture in eval mode with 1000 classes and calibrated random weights.

    `side`: pixels of the images. `options` are passed to the architecture.
    """
    options |= {"init_weights": True} if name in _WARN_WITHOUT_INIT else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.get_model(name, weights=None, **options)
    return calibrated(
        model, images(_CALIBRATION_IMAGES, name, seed=_CALIBRATION_SEED, side=side), seed=seed
    )


def architecture(name: str) -> Architecture:
    """Return the architecture for a corpus, with eight images in batches of four."""
    return Architecture(
        name,
        lambda: build(name),
        lambda count, seed: {"input": images(count, name, seed=seed)},
        settle=lambda *_: None,  # `build` has calibrated it.
        count=8,  # The float64 reference of a large model takes long.
        batch_size=4,
    )


def calibrated(model: nn.Module, observed: NDArray[np.float32], *, seed: int = 0) -> nn.Module:
    """Calibrate a model on images and return it in eval mode.

    A head of zeros and ConvNeXt's block scales get ordinary values, BatchNorm gets the statistics
    of the images, and the logits of each class get a mean of zero.
    """
    head = [m for m in model.eval().modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]
    if not head.weight.any():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nn.init.trunc_normal_(head.weight, std=0.02)
    for key, parameter in model.named_parameters():
        if key.endswith("layer_scale"):
            nn.init.constant_(parameter, 0.1)
    arrays: Arrays = {"input": observed}
    with torch.no_grad():
        calibrate(model, arrays)
        center_logits(model, head, arrays)
    return model
