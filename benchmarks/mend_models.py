"""Models for the benchmarks of gate mend and gate reproduce."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.bench import SAMPLES, Bench, Pair
from benchmarks.corpus.entry import Entry, export_then_edit, summary_of
from benchmarks.corpus.exporters import DIRECT_17, DYNAMO_18, Recipe
from benchmarks.corpus.samples import Arrays
from tests.localize.optimizers.faults import FAULTS, OptimizerFault


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)


class _TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)


class Repeats(nn.Module):
    """A model with `repeat_interleave` by a tensor, whose columns ONNX Runtime's optimizers
    lose.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(8, 4)
        self.register_buffer("repeats", torch.tensor([1, 2, 0, 1, 3, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).repeat_interleave(self.repeats, 1))


class SmallLogarithms(_TwoLayers):
    """A model with `log1p`, exported as Log(1 + x), which loses the digits of small numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(1e6 * torch.log1p(1e-6 * self.first(x).abs()))


class Similar(_TwoBranches):
    """A model with `cosine_similarity` of short vectors.

    The exporter bounds the product of the norms by eps, while PyTorch bounds each norm.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.cosine_similarity(self.left(x) / 20, self.right(x) / 20, eps=0.1)


class Distant(_TwoBranches):
    """A model with `pairwise_distance`, which is exported without eps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pairwise_distance(self.left(x), self.right(x), eps=0.2, keepdim=True)


class Distances(nn.Module):
    """A model with `cdist` of points, for which the file returns NaN or infinity if two are
    equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(torch.cdist(y, y.flip(1), p=1.0))


class Chunks(_TwoLayers):
    """A model that modifies one chunk in place; the exported file loses the modification."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * 1.0
        y.chunk(2, 1)[0].mul_(3.0)
        return self.last(y)


class Added(_TwoBranches):
    """A model with `logaddexp`, exported by dynamo as Log(Exp(a) + Exp(b)), which overflows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logaddexp(90 * self.left(x), 90 * self.right(x))


class Losses(nn.Module):
    """A model with a binary cross-entropy loss, exported as logarithms of probabilities of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        targets = torch.sigmoid(y)
        return functional.binary_cross_entropy_with_logits(90 * y, targets, reduction="none")


def _sampler(*shape: int, dtype: type = np.float32) -> Callable[[int, int], Arrays]:
    def draw(count: int, seed: int) -> Arrays:
        numbers = np.random.default_rng(seed).normal(size=(count, *shape))
        return {"input": numbers.astype(dtype)}

    return draw


def _architecture(
    make: Callable[[], nn.Module], draw: Callable[[int, int], Arrays]
) -> Architecture:
    """Return an architecture that keeps its random weights."""
    name = getattr(make, "__name__", "net").lower()
    return Architecture(
        name, make, draw, outputs=("output",), classes=False, settle=lambda *_: None
    )


def _exporter_entry(
    make: Callable[[], nn.Module], *shape: int, recipe: Recipe = DIRECT_17
) -> Entry:
    """Return an entry whose file the exporter or the runtime gets wrong without an edit."""
    architecture = _architecture(make, _sampler(*shape))
    write_file = export_then_edit(lambda *_: None, architecture, recipe)
    return Entry("more", architecture.name, architecture, recipe, summary_of(make), write_file)


def _optimizer_entry(title: str, fault: OptimizerFault) -> Entry:
    draw = _sampler(*fault.inputs.shape[1:], dtype=fault.inputs.dtype.type)
    architecture = _architecture(fault.model, draw)

    def make(bench: Bench, path: Path) -> Pair:
        fault.file(path)
        model, record = bench.model(architecture), DIRECT_17.record()
        return Pair(path, model, draw(SAMPLES, 0), record)

    return Entry("optimizer", title, architecture, DIRECT_17, title, make)


MORE_FAULTS: list[Entry] = [
    # The outputs of "a norm of another axis" depend on the other samples of the batch.
    *(_optimizer_entry(title, fault) for title, fault in FAULTS.items() if fault.dynamic),
    _exporter_entry(Repeats, 6),
    _exporter_entry(SmallLogarithms, 6),
    _exporter_entry(Similar, 6),
    _exporter_entry(Distant, 6),
    _exporter_entry(Distances, 4, 5),
    _exporter_entry(Chunks, 6),
    _exporter_entry(Losses, 6),
    _exporter_entry(Added, 6, recipe=DYNAMO_18),
]
"""Faults of the exporters of PyTorch and of ONNX Runtime's optimizers that the corpus lacks."""
