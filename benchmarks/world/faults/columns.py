"""Section 1: a faulty column or channel next to others in larger units, or behind a mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.world.architectures.seeds import SEEDS
from benchmarks.world.fault import DIRECT_17, DYNAMO_18, AppliedAfter, fault_of

Change = Callable[[torch.Tensor], torch.Tensor]

_SMALLEST = {
    "own-money": -1,
    "own-weather": 3,
    "own-boxes-and-score": -1,
    "own-deep-ar": 2,
    "hf-patchtst": 2,
    "hf-patch-mixer": 2,
}
"""The column of the first output that is in the smallest unit."""


_EVERY = tuple(
    (name, "", DYNAMO_18 if name.startswith("hf-patch") else DIRECT_17) for name in _SMALLEST
)


def _column(model: nn.Module, architecture: Architecture, change: Change) -> nn.Module:
    place = _SMALLEST[architecture.name.partition(".")[0]]

    def changed(first: torch.Tensor, *others: torch.Tensor) -> object:
        columns = list(first.unbind(-1))
        columns[place] = change(columns[place])
        whole = torch.stack(columns, dim=-1)
        return (whole, *others) if others else whole

    return AppliedAfter(model, changed)


_SEEDED = tuple(f"{name}.{seed}" for name in ("own-money", "own-weather") for seed in SEEDS)


@fault_of("small column negated", *_EVERY, *_SEEDED, ("own-money", "", DYNAMO_18))
def negated(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The column in the smallest unit has the other sign."""
    return _column(model, architecture, torch.neg)


@fault_of("small column scaled", *_EVERY, *_SEEDED, ("own-weather", "", DYNAMO_18))
def scaled(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The column in the smallest unit is 3 % too large."""
    return _column(model, architecture, lambda column: column * 1.03)


@fault_of("small column in fp16", *_EVERY, ("own-boxes-and-score", "", DYNAMO_18))
def in_half(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The column in the smallest unit goes through fp16."""
    return _column(model, architecture, lambda column: column.half().float())


@fault_of("small column shifted", *_EVERY)
def shifted(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The column in the smallest unit is off by a thousandth of its own spread."""

    def change(column: torch.Tensor) -> torch.Tensor:
        return column + _SPREADS.get(architecture.name, 1e-4)

    return _column(model, architecture, change)


_SPREADS = {"own-weather": 2e-6, "hf-patchtst": 5e-5, "hf-patch-mixer": 5e-5, "own-deep-ar": 5e-5}


@fault_of(
    "one coordinate off",
    "own-boxes-and-score",
    "hf-detr",
    "hf-yolos",
    "tv-fcos",
    "tv-ssd",
    "tv-retina",
    "own-centre-net",
    ("hf-yolos", "", DYNAMO_18),
)
def one_coordinate(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The third coordinate of every box is off by a thousandth of the picture."""
    step = {"own-boxes-and-score": 0.64, "own-centre-net": 0.032, "tv-fcos": 0.064}
    add = step.get(architecture.name, 1e-3)
    channels = -3 if architecture.name == "own-centre-net" else -1

    def changed(*outputs: torch.Tensor) -> object:
        boxes = outputs[-1]
        places = torch.arange(boxes.shape[channels])
        at = (places == 2).to(boxes.dtype).reshape(-1, *[1] * (-1 - channels))
        moved = boxes + at * add
        return (*outputs[:-1], moved) if len(outputs) > 1 else moved

    return AppliedAfter(model, changed)


@fault_of(
    "other words win", "own-masked-words", "own-least-words", "own-lost-words", "own-next-item"
)
def words_swapped(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """The scores of neighboring words are swapped where both are allowed."""

    def changed(scores: torch.Tensor) -> torch.Tensor:
        other = scores.roll(1, dims=1)
        both = (scores > -1e8) & (other > -1e8)
        return torch.where(both, other, scores)

    return AppliedAfter(model, changed)


@fault_of(
    "scores beside a mask",
    "own-masked-words",
    "own-least-words",
    "own-lost-words",
    "own-next-item",
    ("own-masked-words", "", DYNAMO_18),
)
def unmasked_in_half(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """What is not masked goes through fp16."""

    def changed(scores: torch.Tensor) -> torch.Tensor:
        return torch.where(scores > -1e8, scores.clamp(-1e4, 1e4).half().to(scores.dtype), scores)

    return AppliedAfter(model, changed)


@fault_of("another temperature", "own-masked-words", "own-least-words", "own-lost-words")
def warmer(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """What is not masked is 1 % larger."""
    return AppliedAfter(model, lambda scores: torch.where(scores > -1e8, scores * 1.01, scores))


@fault_of("one word more is masked", "own-masked-words", "own-lost-words", "own-next-item")
def masked_more(model: nn.Module, _architecture: Architecture) -> nn.Module:
    """One word is always masked."""

    def changed(scores: torch.Tensor) -> torch.Tensor:
        lost = torch.arange(scores.shape[1]) == 7
        return torch.where(lost, torch.full((), -1e9, dtype=scores.dtype), scores)

    return AppliedAfter(model, changed)


_CHANNELS = {
    "hf-segformer": 4,
    "tv-fcn": 1,
    "tv-deeplab": 3,
    "tv-lraspp": 2,
    "tv-keypoints": 1,
    "own-centre-net": 2,
    "own-separator": 1,
    "own-causal": 1,
    "own-running": 0,
}


@fault_of("one channel", *_CHANNELS, ("tv-fcn", "", DYNAMO_18))
def one_channel(model: nn.Module, architecture: Architecture) -> nn.Module:
    """One channel of axis 1 is 1 % too large."""
    place = _CHANNELS[architecture.name]

    def changed(first: torch.Tensor, *others: torch.Tensor) -> object:
        at = (torch.arange(first.shape[1]) == place).to(first.dtype)
        whole = first * (1 + 0.01 * at.reshape(-1, *[1] * (first.ndim - 2)))
        return (whole, *others) if others else whole

    return AppliedAfter(model, changed)
