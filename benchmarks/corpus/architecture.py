"""An architecture of the corpus: its model factory, inputs and dynamic axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torchvision
from torch import nn

from benchmarks.corpus import samples
from benchmarks.corpus.models import attention, convolutional, sequence, spatial, wide, wiring
from benchmarks.corpus.samples import Arrays

BATCH = "batch"


@dataclass(frozen=True)
class Architecture:
    """A model and its inputs. Axis 0 of all inputs and outputs is the batch axis."""

    name: str
    make: Callable[[], nn.Module]
    """Return a model with random weights, drawn from torch's global generator."""
    draw: Callable[[int, int], Arrays]
    """Draw samples from (count, seed), in the order of the arguments of `forward`."""
    outputs: tuple[str, ...] = ("logits",)
    classes: bool = True
    """True if the argmax along axis 1 of the first output is the predicted class."""
    head: str = "fc"
    """Path of the layer that computes the scores, which are centered so that predictions vary."""
    axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Dynamic axes besides the batch: input or output, axis, name."""
    traceable: bool = True
    """False if `forward` branches on data. Its traces are among the faults."""
    least_opset: int = 0
    """Lowest opset for which the TorchScript exporter is right; lower ones are among the faults."""
    rewritten: Callable[[], nn.Module] | None = None
    """A model with the same parameters and another `forward`, for the dynamo exporter."""
    settle: Callable[[nn.Module, Architecture, Arrays], None] | None = None
    """Gives the weights the statistics of trained ones, instead of the default method."""
    count: int | None = None
    """Number of samples, or None for the default of the bench."""
    batch_size: int | None = None
    """Batch size of the measurement, or None for the default of the bench."""

    def dynamic_axes(self, name: str) -> dict[int, str]:
        """Return all dynamic axes of an input or output."""
        return {0: BATCH, **self.axes.get(name, {})}


def image_architecture(
    make: Callable[[], nn.Module],
    size: int = 32,
    *,
    name: str = "",
    input_: str = "input",
    **fields: Any,
) -> Architecture:
    """Return an architecture that takes normalized images of `size` pixels.

    `name` is that of the model's class in lower case unless it is given.
    """
    return Architecture(
        name or make.__name__.lower(),
        make,
        lambda n, seed: {input_: samples.normalized(n, size, seed=seed)},
        **fields,
    )


_ALL = (
    image_architecture(convolutional.ResNet),
    image_architecture(partial(torchvision.models.resnet18, num_classes=10), 64, name="resnet18"),
    image_architecture(convolutional.MobileNet),
    image_architecture(convolutional.Pooling, 30),
    image_architecture(attention.VisionTransformer, name="vit"),
    Architecture(
        "tokens",
        attention.TokenClassifier,
        lambda n, seed: {"tokens": samples.tokens(n, 24, vocabulary=120, seed=seed)},
        axes={"tokens": {1: "length"}},
    ),
    Architecture(
        "recurrent",
        sequence.Recurrent,
        lambda n, seed: {"series": samples.series(n, 20, 5, seed=seed)},
        axes={"series": {1: "length"}},
    ),
    Architecture(
        "points",
        sequence.Points,
        lambda n, seed: {"points": samples.points(n, 48, seed=seed)},
        axes={"points": {1: "number"}},
        least_opset=16,
    ),
    image_architecture(
        spatial.Segmenter,
        input_="image",
        outputs=("scores",),
        axes={"image": {2: "height", 3: "width"}, "scores": {2: "height", 3: "width"}},
    ),
    image_architecture(spatial.Pyramid),
    image_architecture(
        spatial.Generator,
        24,
        input_="image",
        outputs=("generated",),
        classes=False,
        head="expand",
    ),
    image_architecture(
        wide.Stylist,
        64,
        input_="image",
        outputs=("styled",),
        classes=False,
        head="leave",
    ),
    Architecture(
        "denoiser",
        wide.Denoiser,
        lambda n, seed: {
            "image": samples.normalized(n, 48, seed=seed),
            "step": samples.steps(n, seed=seed),
        },
        outputs=("noise",),
        classes=False,
        head="leave",
    ),
    image_architecture(wide.Texture, 64),
    Architecture(
        "branching",
        wiring.Branching,
        lambda n, seed: {"input": samples.images(n, 32, seed=seed)},
        traceable=False,
        rewritten=wiring.Conditional,
    ),
    Architecture(
        "two-inputs",
        wiring.TwoInputs,
        lambda n, seed: {
            "image": samples.normalized(n, 32, seed=seed),
            "numbers": samples.series(n, 1, 6, seed=seed)[:, 0],
        },
    ),
    Architecture(
        "difference",
        wiring.Difference,
        lambda n, seed: {
            "before": samples.normalized(n, 32, seed=seed),
            "after": samples.normalized(n, 32, seed=seed + 1),
        },
    ),
    image_architecture(wiring.Detector, outputs=("scores", "boxes", "embedding", "label")),
    Architecture(
        "camera",
        wiring.Camera,
        lambda n, seed: {"image": samples.pixels(n, 48, seed=seed)},
    ),
)

ARCHITECTURES: dict[str, Architecture] = {architecture.name: architecture for architecture in _ALL}
