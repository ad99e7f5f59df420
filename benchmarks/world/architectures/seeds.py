"""The same architectures with other weights and samples: `own-fraud.2` is `own-fraud` with seed
2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays

SEEDS = (1, 2, 3)
_APART = 10_000
"""Between the seeds of samples, so that no two architectures share any."""
_NAMES = (
    "own-money",
    "own-weather",
    "own-boxes-and-score",
    "own-place",
    "own-tagger",
    "own-fraud",
    "own-masked-words",
    "own-heavy-tail",
    "own-embedded",
    "own-ranked",
    "own-class-map",
    "own-bytes",
    "own-depth",
    "own-centre-net",
    "own-running",
    "own-dlrm",
    "own-cross-network",
    "own-deep-ar",
    "tv-retina",
    "tv-ssd",
)
"""Those that judges refused now and then: small probabilities, tails, near-ties, columns."""


def seeded(architectures: Iterable[Architecture]) -> Iterator[Architecture]:
    """Some of the architectures, each with every seed."""
    for one in architectures:
        if one.name in _NAMES:
            yield from (_seeded(one, seed) for seed in SEEDS)


def _seeded(one: Architecture, seed: int) -> Architecture:
    def make() -> nn.Module:
        torch.manual_seed(seed)
        return one.make()

    def draw(count: int, drawn: int) -> Arrays:
        return one.draw(count, drawn + _APART * seed)

    return replace(one, name=f"{one.name}.{seed}", make=make, draw=draw)
