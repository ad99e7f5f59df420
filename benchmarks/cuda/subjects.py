"""The models of the matrix, with random weights from fixed seeds.

These are the pipeline's digits model, two models of torchvision, and nets whose kernels on CUDA
differ most from those on the CPU. Nothing is downloaded.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks import torchvision_models
from benchmarks.corpus import samples
from benchmarks.corpus.architecture import ARCHITECTURES, Architecture, image_architecture
from benchmarks.cuda.convolutional_nets import Grouped, Volumes
from gate.model.loading import torchvision_model

DIGITS_SIDE, DIGITS_CLASSES = 64, 10
"""The image size and the number of classes in params.yaml."""


MODELS: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        image_architecture(
            partial(torchvision_model, "resnet18", weights=None, num_classes=DIGITS_CLASSES),
            DIGITS_SIDE,
            name="digits",
        ),
        ARCHITECTURES["tokens"],
        ARCHITECTURES["recurrent"],
        image_architecture(Grouped, 48),
        Architecture(
            "volumes",
            Volumes,
            lambda n, seed: {
                "volume": samples.normalized(n, 32, seed=seed)[:, :1, None]
                * np.linspace(0.5, 1.5, 8, dtype=np.float32)[:, None, None]
            },
        ),
        *map(torchvision_models.architecture, ("resnet50", "vit_b_16")),
    )
}
