"""Section 2: rounded or clipped probabilities, logarithms, tails, maps, bytes, ranks and sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.effect import compute_outputs
from benchmarks.corpus.trained import build_trained
from benchmarks.world.architectures.seeds import SEEDS
from benchmarks.world.fault import (
    DIRECT_17,
    DYNAMO_18,
    AppliedAfter,
    as_exported,
    fault_of,
)

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


def _change_first_output(
    model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> nn.Module:
    def change_outputs(first: torch.Tensor, *others: torch.Tensor) -> object:
        return (change(first), *others) if others else change(first)

    return AppliedAfter(model, change_outputs)


_SEEDED = tuple(f"{name}.{seed}" for name in ("own-tagger", "own-fraud") for seed in SEEDS)


@fault_of("probabilities in fp16", *_PROBABILITIES, *_SEEDED, ("own-fraud", "", DYNAMO_18))
def in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Round the probabilities to float16."""
    return _change_first_output(
        model, lambda probabilities: probabilities.half().to(probabilities.dtype)
    )


@fault_of(
    "probabilities clipped",
    *(name for name in _PROBABILITIES if name not in ("own-cross-network", "tv-retina", "tv-fcos")),
)
def clipped(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Raise probabilities below 0.001 to 0.001."""
    return _change_first_output(model, lambda probabilities: probabilities.clamp_min(1e-3))


@fault_of("prior off", "own-tagger", "own-fraud", "tv-retina", "own-dlrm", *_SEEDED)
def other_prior(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Add 0.001 to the bias of the layer that computes the probabilities."""
    return _change_first_output(
        model,
        lambda probabilities: torch.sigmoid(torch.logit(probabilities.double()) + 1e-3).to(
            probabilities.dtype
        ),
    )


@fault_of("logarithm clipped", "own-log-probabilities", "own-m5", ("own-m5", "", DYNAMO_18))
def clipped_logarithm(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Clip log-probabilities at the logarithm of 0.001."""
    return AppliedAfter(model, lambda logs: logs.clamp_min(-6.9))


def _threshold_of_late_samples(architecture: Architecture, first_late: int) -> torch.Tensor:
    """Return a threshold per column that only samples from `late` on exceed.

    It is halfway between the largest outputs before and after, or infinite if no later output is
    larger.
    """
    (answers, *_) = compute_outputs(
        build_trained(architecture), architecture.draw(architecture.count or 24, 0)
    )
    before, after = answers[:first_late].max(axis=0), answers[first_late:].max(axis=0)
    return torch.from_numpy(np.where(after > before, (before + after) / 2, np.inf))


@fault_of("largest answers of late samples", "own-heavy-tail", ("own-heavy-tail", "", DYNAMO_18))
def late_tail(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Raise outputs that exceed all outputs of the first 100 samples by 1 %."""
    limit = _threshold_of_late_samples(architecture, 100)
    return AppliedAfter(
        model, lambda answers: torch.where(answers > limit, answers * 1.01, answers)
    )


@fault_of("largest answers end", "own-heavy-tail", "own-money", "own-fraud")
def late_clip(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Clip outputs at the largest output of the first 40 samples."""
    limit = _threshold_of_late_samples(architecture, 40)
    return AppliedAfter(model, lambda answers: torch.minimum(answers, limit.to(answers.dtype)))


_SEEDED_TAILS = tuple(f"own-heavy-tail.{seed}" for seed in SEEDS)


@fault_of("heavy tail in fp16", "own-heavy-tail", "own-depth", *_SEEDED_TAILS)
def tail_in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Round the outputs to float16."""
    return _change_first_output(model, lambda answers: answers.half().to(answers.dtype))


def _change_last_output(
    model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> nn.Module:
    def change_outputs(*outputs: torch.Tensor) -> object:
        return (*outputs[:-1], change(outputs[-1])) if len(outputs) > 1 else change(outputs[0])

    return AppliedAfter(model, change_outputs)


_MAPS = ("own-class-map", "own-map-and-scores")


@fault_of(
    "pixels of a map",
    *_MAPS,
    *(f"own-class-map.{seed}" for seed in SEEDS),
    ("own-class-map", "", DYNAMO_18),
)
def four_pixels(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Replace the class of four pixels of every map with the next class."""

    def change(classes: torch.Tensor) -> torch.Tensor:
        offsets = torch.zeros(32, 32, dtype=torch.int64)
        offsets[7, 3:7] = 1
        return (classes + offsets) % 6

    return _change_last_output(model, change)


@fault_of("corner of a map", *_MAPS)
def last_column(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Repeat the second last column of every map in the last column."""
    return _change_last_output(
        model, lambda classes: torch.cat([classes[..., :-1], classes[..., -2:-1]], dim=-1)
    )


@fault_of("classes of a map swapped", *_MAPS)
def swapped_classes(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Swap classes 2 and 3 in the map."""
    return _change_last_output(
        model, lambda classes: torch.where((classes == 2) | (classes == 3), 5 - classes, classes)
    )


@fault_of("bytes off by one", "own-bytes", ("own-bytes", "", DYNAMO_18))
def off_by_one(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Raise every 101st pixel by one level."""

    def change(levels: torch.Tensor) -> torch.Tensor:
        offsets = (torch.arange(32 * 32) % 101 == 0).reshape(32, 32).to(torch.int64)
        return (levels.to(torch.int64) + offsets).clamp(0, 255).to(torch.uint8)

    return AppliedAfter(model, change)


@fault_of("truncated instead of rounded", "own-bytes")
def truncated(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Truncate levels instead of rounding them."""

    class TruncatedBytes(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            return (torch.sigmoid(self.model.scores(picture)) * 255.0).to(torch.uint8)

    return TruncatedBytes(model)


@fault_of("ranks", "own-ranked", ("own-ranked", "", DYNAMO_18))
def ranks_swapped(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Swap the indices of the first and the second rank, but not their scores."""
    return AppliedAfter(model, lambda best, who: (best, who[:, [1, 0, 2]]))


@fault_of("ranks off by one", "own-ranked")
def ranks_from_one(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Count indices from one instead of zero."""
    return AppliedAfter(model, lambda best, who: (best, who + 1))


@fault_of("third rank", "own-ranked")
def third_repeated(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Repeat the index of the second rank in the third."""
    return AppliedAfter(model, lambda best, who: (best, who[:, [0, 1, 1]]))


@fault_of("running sum", "own-running", ("own-running", "", DYNAMO_18))
def exclusive(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Exclude the current step from the running sum."""
    return AppliedAfter(model, lambda sums: torch.cat([sums[..., :1] * 0, sums[..., :-1]], dim=-1))


@fault_of("running sum", "own-running")
def steps_in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """Round the running sums to float16."""
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
