"""Narrow parts of torchvision's detection, segmentation and video models, and classifiers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import nn

from benchmarks.corpus import samples
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.world.initial_weights import settle
from benchmarks.world.models import vision

_SIZE = 64


def _image(count: int, seed: int) -> Arrays:
    return {"image": samples.normalized(count, _SIZE, seed=seed)}


def _small_image(count: int, seed: int) -> Arrays:
    return {"image": samples.normalized(count, 32, seed=seed)}


def _clip(count: int, seed: int) -> Arrays:
    """Return clips of four images with rising brightness: float32 (count, 3, 4, 32, 32)."""
    first = samples.normalized(count, 32, seed=seed)[:, :, None]
    return {"clip": (first * np.linspace(0.8, 1.2, 4)[:, None, None]).astype(np.float32)}


def _torchvision_architecture(
    name: str,
    make: Callable[[], nn.Module],
    *outputs: str,
    head: str = "",
    draw: Callable[[int, int], Arrays] = _image,
) -> Architecture:
    return Architecture(
        f"tv-{name}",
        make,
        draw,
        outputs=outputs or ("logits",),
        classes=not outputs,
        head=head,
        settle=settle,
        count=32,
    )


ARCHITECTURES: list[Architecture] = [
    _torchvision_architecture("retina", vision.Retina, "scores", "deltas"),
    _torchvision_architecture("fcos", vision.Fcos, "scores", "distances"),
    _torchvision_architecture("ssd", vision.Ssd, "scores", "deltas"),
    _torchvision_architecture("proposals", vision.Proposals, "objects", "coarse", "deltas"),
    _torchvision_architecture("keypoints", vision.Keypoints, "heat"),
    _torchvision_architecture("fcn", vision.fcn, head="head.4"),
    _torchvision_architecture("deeplab", vision.deeplab, head="head.4"),
    _torchvision_architecture("lraspp", vision.Lraspp),
    _torchvision_architecture("swin-video", vision.swin_video, head="head", draw=_clip),
    _torchvision_architecture("maxvit", vision.maxvit, draw=_small_image),
    _torchvision_architecture("convnext", vision.convnext, head="classifier.2", draw=_small_image),
    _torchvision_architecture("shufflenet", vision.shufflenet, head="fc"),
    _torchvision_architecture("squeezenet", vision.squeezenet, head="classifier.1"),
    _torchvision_architecture("regnet", vision.regnet, head="fc"),
]
