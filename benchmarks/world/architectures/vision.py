"""torchvision: narrow parts of detection, segmentation and video models, and classifiers."""

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
    return {"image": samples.normalised(count, _SIZE, seed=seed)}


def _small(count: int, seed: int) -> Arrays:
    return {"image": samples.normalised(count, 32, seed=seed)}


def _clip(count: int, seed: int) -> Arrays:
    """Four pictures of 32 pixels, each a little brighter: float32 (count, 3, 4, 32, 32)."""
    first = samples.normalised(count, 32, seed=seed)[:, :, None]
    return {"clip": (first * np.linspace(0.8, 1.2, 4)[:, None, None]).astype(np.float32)}


def _made(
    name: str,
    make: Callable[[], nn.Module],
    *outputs: str,
    head: str = "",
    drawn: Callable[[int, int], Arrays] = _image,
) -> Architecture:
    return Architecture(
        f"tv-{name}",
        make,
        drawn,
        outputs=outputs or ("logits",),
        classes=not outputs,
        head=head,
        settle=settle,
        count=32,
    )


ARCHITECTURES: list[Architecture] = [
    _made("retina", vision.Retina, "scores", "deltas"),
    _made("fcos", vision.Fcos, "scores", "distances"),
    _made("ssd", vision.Ssd, "scores", "deltas"),
    _made("proposals", vision.Proposals, "objects", "coarse", "deltas"),
    _made("keypoints", vision.Keypoints, "heat"),
    _made("fcn", vision.fcn, head="head.4"),
    _made("deeplab", vision.deeplab, head="head.4"),
    _made("lraspp", vision.Lraspp),
    _made("swin-video", vision.swin_video, head="head", drawn=_clip),
    _made("maxvit", vision.maxvit, drawn=_small),
    _made("convnext", vision.convnext, head="classifier.2", drawn=_small),
    _made("shufflenet", vision.shufflenet, head="fc"),
    _made("squeezenet", vision.squeezenet, head="classifier.1"),
    _made("regnet", vision.regnet, head="fc"),
]
