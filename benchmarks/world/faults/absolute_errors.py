"""Section 2: functions that lose digits, tails, integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.effect import computed
from benchmarks.corpus.trained import trained
from benchmarks.world.architectures.seeds import SEEDS
from benchmarks.world.fault import DIRECT_17, DYNAMO_18, AppliedAfter, as_exported, fault_of

_PROBABILITIES = (
    "own-tagger",
    "own-fraud",
    "own-dlrm",
    "own-cross-network",
    "own-centre-net",
    "tv-retina",
    "tv-fcos",
    "tv-ssd",
)


def _first(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    def changed(first: torch.Tensor, *others: torch.Tensor) -> object:
        return (change(first), *others) if others else change(first)

    return AppliedAfter(model, changed)


_SEEDED = tuple(f"{name}.{seed}" for name in ("own-tagger", "own-fraud") for seed in SEEDS)


@fault_of("probabilities in fp16", *_PROBABILITIES, *_SEEDED, ("own-fraud", "", DYNAMO_18))
def in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The probabilities go through fp16."""
    return _first(model, lambda shares: shares.half().to(shares.dtype))


@fault_of(
    "probabilities clipped",
    *(name for name in _PROBABILITIES if name not in ("own-cross-network", "tv-retina", "tv-fcos")),
)
def clipped(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Probabilities below a thousandth become a thousandth."""
    return _first(model, lambda shares: shares.clamp_min(1e-3))


@fault_of("prior off", "own-tagger", "own-fraud", "tv-retina", "own-dlrm", *_SEEDED)
def other_prior(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The bias behind the probabilities is off by a thousandth."""
    return _first(
        model, lambda shares: torch.sigmoid(torch.logit(shares.double()) + 1e-3).to(shares.dtype)
    )


@fault_of("logarithm clipped", "own-log-probabilities", "own-m5", ("own-m5", "", DYNAMO_18))
def clipped_logarithm(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Log-probabilities end at that of a thousandth."""
    return AppliedAfter(model, lambda logs: logs.clamp_min(-6.9))


def _late_threshold(architecture: Architecture, late: int) -> torch.Tensor:
    """Of each column, halfway between the largest answers before and behind the sample `late`;
    infinite where no later answer is larger."""
    (answers, *_) = computed(trained(architecture), architecture.draw(architecture.count or 24, 0))
    before, behind = answers[:late].max(axis=0), answers[late:].max(axis=0)
    return torch.from_numpy(np.where(behind > before, (before + behind) / 2, np.inf))


@fault_of("largest answers of late samples", "own-heavy-tail", ("own-heavy-tail", "", DYNAMO_18))
def late_tail(model: nn.Module, architecture: Architecture) -> nn.Module:
    """What is larger than all answers of the first 100 samples is 1 % too large."""
    limit = _late_threshold(architecture, 100)
    return AppliedAfter(
        model, lambda answers: torch.where(answers > limit, answers * 1.01, answers)
    )


@fault_of("largest answers end", "own-heavy-tail", "own-money", "own-fraud")
def late_clip(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Nothing is larger than the largest answer of the first 40 samples."""
    limit = _late_threshold(architecture, 40)
    return AppliedAfter(model, lambda answers: torch.minimum(answers, limit.to(answers.dtype)))


_TAILS = tuple(f"own-heavy-tail.{seed}" for seed in SEEDS)


@fault_of("heavy tail in fp16", "own-heavy-tail", "own-depth", *_TAILS)
def tail_in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The answers go through fp16."""
    return _first(model, lambda answers: answers.half().to(answers.dtype))


def _map(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    def changed(*outputs: torch.Tensor) -> object:
        return (*outputs[:-1], change(outputs[-1])) if len(outputs) > 1 else change(outputs[0])

    return AppliedAfter(model, changed)


_MAPS = ("own-class-map", "own-map-and-scores")


@fault_of(
    "pixels of a map",
    *_MAPS,
    *(f"own-class-map.{seed}" for seed in SEEDS),
    ("own-class-map", "", DYNAMO_18),
)
def four_pixels(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Four pixels of every map have the next class."""

    def change(classes: torch.Tensor) -> torch.Tensor:
        at = torch.zeros(32, 32, dtype=torch.int64)
        at[7, 3:7] = 1
        return (classes + at) % 6

    return _map(model, change)


@fault_of("corner of a map", *_MAPS)
def last_column(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The last column of every map repeats the one before."""
    return _map(model, lambda classes: torch.cat([classes[..., :-1], classes[..., -2:-1]], dim=-1))


@fault_of("classes of a map swapped", *_MAPS)
def swapped_classes(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Classes 2 and 3 are swapped in the map."""
    return _map(
        model, lambda classes: torch.where((classes == 2) | (classes == 3), 5 - classes, classes)
    )


@fault_of("bytes off by one", "own-bytes", ("own-bytes", "", DYNAMO_18))
def off_by_one(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """One pixel of a hundred is one level too bright."""

    def change(levels: torch.Tensor) -> torch.Tensor:
        at = (torch.arange(32 * 32) % 101 == 0).reshape(32, 32).to(torch.int64)
        return (levels.to(torch.int64) + at).clamp(0, 255).to(torch.uint8)

    return AppliedAfter(model, change)


@fault_of("truncated instead of rounded", "own-bytes")
def truncated(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Levels are cut, not rounded."""

    class Cut(nn.Module):
        def __init__(self, of: nn.Module) -> None:
            super().__init__()
            self.of = of

        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            return (torch.sigmoid(self.of.scores(picture)) * 255.0).to(torch.uint8)

    return Cut(model)


@fault_of("ranks", "own-ranked", ("own-ranked", "", DYNAMO_18))
def ranks_swapped(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Who comes first and who second is swapped; their scores are not."""
    return AppliedAfter(model, lambda best, who: (best, who[:, [1, 0, 2]]))


@fault_of("ranks off by one", "own-ranked")
def ranks_from_one(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Indices count from one."""
    return AppliedAfter(model, lambda best, who: (best, who + 1))


@fault_of("third rank", "own-ranked")
def third_repeated(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """In the third place stands the second again."""
    return AppliedAfter(model, lambda best, who: (best, who[:, [0, 1, 1]]))


@fault_of("running sum", "own-running", ("own-running", "", DYNAMO_18))
def exclusive(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The running sum leaves out the step itself."""
    return AppliedAfter(model, lambda sums: torch.cat([sums[..., :1] * 0, sums[..., :-1]], dim=-1))


@fault_of("running sum", "own-running")
def steps_in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The sums go through fp16."""
    return AppliedAfter(model, lambda sums: sums.half().to(sums.dtype))


for exporter in (DIRECT_17, DYNAMO_18):
    as_exported(
        "log of a sigmoid",
        "own-log-likelihood",
        exporter,
        "The exporter writes logsigmoid as Log(Sigmoid), which is -inf below about -18.",
    )
    as_exported(
        "log of one and little",
        "own-small-increase",
        exporter,
        "The exporter writes log1p as Log(1 + x), which loses what is small beside one.",
    )
