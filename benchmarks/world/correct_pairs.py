"""Correct pairs: every architecture with both exporters, and further seeds with one exporter.

Float64 and ONNX Runtime alone decided which exported files are right, on the samples and on other
batch sizes. A pair whose file is silently wrong is listed among the faults.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.entry import CORRECT, Entry
from benchmarks.corpus.exporters import DIRECT_17, DYNAMO_18, Recipe
from benchmarks.world.architectures import ARCHITECTURES

RECIPES = (DIRECT_17, DYNAMO_18)

WRONG: dict[str, tuple[str, ...]] = {
    "own-log-likelihood": ("direct", "dynamo"),
    "own-small-increase": ("direct", "dynamo"),
    "own-softened": ("direct",),
    "hf-decision": ("dynamo",),
    "hf-patchtst": ("direct",),
    "hf-patch-mixer": ("direct",),
}
"""Exporters that silently write a wrong file, by architecture."""

REFUSED: dict[str, tuple[str, ...]] = {
    "timm-eva02-tiny-patch14-224": ("direct",),
    "hf-fnet": ("direct",),
    "hf-univnet": ("direct",),
}
"""Exporters that raise an error, by architecture. Their pairs are left out to save time."""


def correct_entry(architecture: Architecture, recipe: Recipe) -> Entry:
    """Return the pair of an architecture and the file written by an exporter."""

    def make(bench: Bench, path: Path) -> Pair:
        return bench.pair(architecture, recipe, path)

    summary = f"{architecture.name} as {recipe.exporter} writes it at opset {recipe.opset}."
    return Entry(CORRECT, architecture.name, architecture, recipe, summary, make)


CORRECT_PAIRS: list[Entry] = [
    correct_entry(architecture, recipe)
    for architecture in ARCHITECTURES.values()
    for recipe in (RECIPES if "." not in architecture.name else (DIRECT_17,))
    if recipe.exporter not in WRONG.get(architecture.name, ())
    and recipe.exporter not in REFUSED.get(architecture.name, ())
]
