"""The same architectures with other weights and samples.

For example, `own-fraud.2` is `own-fraud` with seed 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays

SEEDS = (1, 2, 3)
_SEED_STEP = 10_000
"""Distance between the sample seeds, so that no two architectures share samples."""
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
"""Architectures that some gates wrongly refused: small probabilities, tails, near-ties, columns."""


def with_seeds(architectures: Iterable[Architecture]) -> Iterator[Architecture]:
    """Yield some of the architectures, each with every seed."""
    for architecture in architectures:
        if architecture.name in _NAMES:
            yield from (_with_seed(architecture, seed) for seed in SEEDS)


def _with_seed(architecture: Architecture, seed: int) -> Architecture:
    def make() -> nn.Module:
        torch.manual_seed(seed)
        return architecture.make()

    def draw(count: int, sample_seed: int) -> Arrays:
        return architecture.draw(count, sample_seed + _SEED_STEP * seed)

    return replace(architecture, name=f"{architecture.name}.{seed}", make=make, draw=draw)
