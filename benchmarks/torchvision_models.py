"""Build torchvision's classification architectures with weights that behave like trained ones.

Pretrained weights can't be downloaded here, and initial weights prove little: untrained BatchNorm
divides by one, some heads are all zero, ConvNeXt's blocks are scaled by 1e-6, and nearly every
random network predicts one class for all images. `build` corrects only these four.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import interpolate
from torchvision import models

SIDE = {"inception_v3": 299}
"""Pixels, where they are not 224."""
_INITIALISES = ("googlenet", "inception_v3")
"""Warn unless they are told whether to initialise."""
_CALIBRATION_SEED = 1
_CALIBRATION_IMAGES = 16


def architectures(*, below: int) -> dict[str, int]:
    """Name and number of parameters of each with fewer than `below`, the small ones first.

    The numbers are torchvision's own, of what is left for inference: without auxiliary heads.
    """
    counts = {
        name: int(models.get_model_weights(name).DEFAULT.meta["num_params"])
        for name in models.list_models(module=models)
    }
    return {n: counts[n] for n in sorted(counts, key=counts.__getitem__) if counts[n] < below}


def images(count: int, name: str, *, seed: int, side: int | None = None) -> NDArray[np.float32]:
    """Random images, shape (count, 3, side, side): a smooth field of its own and a little noise.

    All of one scale: a random network that saw 16 images answers an outlier with rounding errors
    of up to a percent, PyTorch as much as the runtime, which says nothing about an export.
    """
    side = side or SIDE.get(name, 224)
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 8, 8, generator=rng)
    smooth = interpolate(coarse, size=(side, side), mode="bilinear")
    seen = smooth + 0.3 * torch.randn(count, 3, side, side, generator=rng)
    return np.asarray((seen / seen.std()).numpy())


def build(name: str, *, seed: int = 0, side: int | None = None, **options: Any) -> nn.Module:
    """The architecture in eval mode, 1000 classes, random weights of `seed`, then `calibrated`.

    `side`: pixels of the images; `options` go to the architecture.
    """
    options |= {"init_weights": True} if name in _INITIALISES else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.get_model(name, weights=None, **options)
    return calibrated(
        model, images(_CALIBRATION_IMAGES, name, seed=_CALIBRATION_SEED, side=side), seed=seed
    )


def calibrated(model: nn.Module, seen: NDArray[np.float32], *, seed: int = 0) -> nn.Module:
    """The model in eval mode: a head of zeros and the scales of ConvNeXt's blocks get the values
    of an ordinary layer, BatchNorm the statistics of the images `seen`, and the head's bias takes
    their mean away."""
    head = _head(model.eval())
    if not head.weight.any():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nn.init.trunc_normal_(head.weight, std=0.02)
    for key, parameter in model.named_parameters():
        if key.endswith("layer_scale"):
            nn.init.constant_(parameter, 0.1)
    calibration = torch.from_numpy(seen)
    with torch.inference_mode():
        _calibrate(model, calibration)
        _centre(model, head, calibration)
    return model


def _head(model: nn.Module) -> nn.Linear | nn.Conv2d:
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]


def _calibrate(model: nn.Module, calibration: torch.Tensor) -> None:
    """Only BatchNorm trains, so that Dropout and stochastic depth stay off; None: plain mean."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    model(calibration)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    model.eval()


def _centre(model: nn.Module, head: nn.Linear | nn.Conv2d, calibration: torch.Tensor) -> None:
    """Take from the bias what all images have in common: then the image decides the class."""
    if head.bias is None:
        return
    seen: list[torch.Tensor] = []
    handle = head.register_forward_hook(lambda _, __, output: seen.append(output))
    model(calibration)
    handle.remove()
    (logits,) = seen
    head.bias -= logits.mean(dim=[axis for axis in range(logits.ndim) if axis != 1])
