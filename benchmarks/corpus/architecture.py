"""An architecture of the corpus: how it is built, its inputs, its dynamic axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torchvision
from torch import nn

from benchmarks.corpus import samples
from benchmarks.corpus.models import attention, convolutional, sequence, spatial, wide, wiring
from benchmarks.corpus.samples import Arrays

BATCH = "batch"


@dataclass(frozen=True)
class Architecture:
    """A model and its inputs. All inputs and outputs have the batch on axis 0."""

    name: str
    make: Callable[[], nn.Module]
    """Random weights, drawn from torch's global generator."""
    draw: Callable[[int, int], Arrays]
    """(count, seed) to samples, in the order in which `forward` takes them."""
    outputs: tuple[str, ...] = ("logits",)
    classes: bool = True
    """Whether the largest of axis 1 of the first output is an answer."""
    head: str = "fc"
    """Path of the layer that gives the scores; it is centered, so that classes differ."""
    axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Dynamic axes beside the batch: input or output, axis, name."""
    traceable: bool = True
    """False: `forward` branches on data, so what a trace gives is among the faults."""
    least_opset: int = 0
    """Below it the TorchScript-based exporter is wrong, and its file is among the faults."""
    rewritten: Callable[[], nn.Module] | None = None
    """The same parameters with another `forward`: what the dynamo exporter is given."""
    settle: Callable[[nn.Module, Architecture, Arrays], None] | None = None
    """Gives the weights the statistics of trained ones, where `trained` itself is not to."""
    count: int | None = None
    """How many samples are drawn; None: as many as the bench says."""
    batch_size: int | None = None
    """Of the measurement; None: as the bench says."""
    gaps: bool = False
    """True if NaN is an answer of the model, as whoever judges it says in the policy."""

    def dynamic(self, name: str) -> dict[int, str]:
        """All dynamic axes of an input or output."""
        return {0: BATCH, **self.axes.get(name, {})}


def _resnet18() -> nn.Module:
    return torchvision.models.resnet18(num_classes=10)


_ALL = (
    Architecture(
        "resnet",
        convolutional.ResNet,
        lambda n, seed: {"input": samples.normalised(n, 32, seed=seed)},
    ),
    Architecture(
        "resnet18",
        _resnet18,
        lambda n, seed: {"input": samples.normalised(n, 64, seed=seed)},
    ),
    Architecture(
        "mobilenet",
        convolutional.MobileNet,
        lambda n, seed: {"input": samples.normalised(n, 32, seed=seed)},
    ),
    Architecture(
        "pooling",
        convolutional.Pooling,
        lambda n, seed: {"input": samples.normalised(n, 30, seed=seed)},
    ),
    Architecture(
        "vit",
        attention.VisionTransformer,
        lambda n, seed: {"input": samples.normalised(n, 32, seed=seed)},
    ),
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
    Architecture(
        "segmenter",
        spatial.Segmenter,
        lambda n, seed: {"image": samples.normalised(n, 32, seed=seed)},
        outputs=("scores",),
        axes={"image": {2: "height", 3: "width"}, "scores": {2: "height", 3: "width"}},
    ),
    Architecture(
        "pyramid",
        spatial.Pyramid,
        lambda n, seed: {"input": samples.normalised(n, 32, seed=seed)},
    ),
    Architecture(
        "generator",
        spatial.Generator,
        lambda n, seed: {"image": samples.normalised(n, 24, seed=seed)},
        outputs=("generated",),
        classes=False,
        head="expand",
    ),
    Architecture(
        "stylist",
        wide.Stylist,
        lambda n, seed: {"image": samples.normalised(n, 64, seed=seed)},
        outputs=("styled",),
        classes=False,
        head="leave",
    ),
    Architecture(
        "denoiser",
        wide.Denoiser,
        lambda n, seed: {
            "image": samples.normalised(n, 48, seed=seed),
            "step": samples.steps(n, seed=seed),
        },
        outputs=("noise",),
        classes=False,
        head="leave",
    ),
    Architecture(
        "texture",
        wide.Texture,
        lambda n, seed: {"input": samples.normalised(n, 64, seed=seed)},
    ),
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
            "image": samples.normalised(n, 32, seed=seed),
            "numbers": samples.series(n, 1, 6, seed=seed)[:, 0],
        },
    ),
    Architecture(
        "difference",
        wiring.Difference,
        lambda n, seed: {
            "before": samples.normalised(n, 32, seed=seed),
            "after": samples.normalised(n, 32, seed=seed + 1),
        },
    ),
    Architecture(
        "detector",
        wiring.Detector,
        lambda n, seed: {"input": samples.normalised(n, 32, seed=seed)},
        outputs=("scores", "boxes", "embedding", "label"),
    ),
    Architecture(
        "camera",
        wiring.Camera,
        lambda n, seed: {"image": samples.pixels(n, 48, seed=seed)},
    ),
)

ARCHITECTURES: dict[str, Architecture] = {one.name: one for one in _ALL}
