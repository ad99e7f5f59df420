"""The correct pairs: every architecture with every exporter at several opsets.

An exporter may refuse; the pair is listed with the reason then, and not counted.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.corpus.architecture import ARCHITECTURES, Architecture
from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.entry import CORRECT, Entry
from benchmarks.corpus.exporters import (
    DIRECT_17,
    DYNAMO_18,
    DYNAMO_20,
    EXTERNAL_18,
    PRESERVED_17,
    SCRIPTED_17,
    TRACED_13,
    Recipe,
)
from benchmarks.corpus.faults import indexing, numbers, shapes
from benchmarks.corpus.models.between import on_images

RECIPES = (
    *(Recipe("traced", opset) for opset in (13, 17, 20)),
    *(Recipe("direct", opset) for opset in (13, 17, 18, 20)),
    Recipe("direct", 17, folding=False),
    PRESERVED_17,
    *(Recipe("scripted", opset) for opset in (13, 17, 20)),
    DYNAMO_18,
    DYNAMO_20,
    EXTERNAL_18,
)

_ALSO: tuple[tuple[Architecture, tuple[Recipe, ...]], ...] = (
    *(
        (numbers.on_intensities(make), (TRACED_13, DIRECT_17, DYNAMO_18))
        for make in (numbers.Standardised, numbers.Logarithmic)
    ),
    *(
        (on_images(make), (TRACED_13, DIRECT_17, DYNAMO_18))
        for make in (numbers.Boxes, numbers.Sharp)
    ),
    *(
        (on_images(make), (DYNAMO_18,))
        for make in (
            indexing.FloorOfNegatives,
            indexing.NegativeIndices,
            indexing.DuplicatePuts,
            indexing.DuplicateAdds,
            indexing.ThroughAView,
        )
    ),
    (on_images(shapes.Halving), (SCRIPTED_17,)),
    (shapes.DARK_IMAGES, (SCRIPTED_17,)),
    (shapes.BAKED_SIZE, (SCRIPTED_17,)),
    (shapes.BAKED_AREA, (SCRIPTED_17,)),
    (shapes.on_tokens(shapes.BakedLength), (SCRIPTED_17,)),
    (shapes.on_tokens(shapes.LongSequences), (SCRIPTED_17,)),
)
"""What one exporter gets wrong and another right: without these, refusing the model whatever the
file would be a way to catch the fault."""


def is_right(architecture: Architecture, recipe: Recipe) -> bool:
    """False where it is known that this exporter writes a wrong file without a word."""
    if recipe.exporter.startswith("dynamo"):
        return True
    baked = recipe.exporter in ("traced", "direct") and not architecture.traceable
    return not baked and recipe.opset >= architecture.least_opset


def _entry(architecture: Architecture, recipe: Recipe) -> Entry:
    def make(bench: Bench, path: Path) -> Pair:
        return bench.pair(architecture, recipe, path)

    summary = f"{architecture.name} as {recipe.exporter} writes it at opset {recipe.opset}."
    return Entry(CORRECT, architecture.name, architecture, recipe, summary, make)


CORRECT_PAIRS: list[Entry] = [
    *(
        _entry(architecture, recipe)
        for architecture in ARCHITECTURES.values()
        for recipe in RECIPES
        if is_right(architecture, recipe)
    ),
    *(_entry(architecture, recipe) for architecture, recipes in _ALSO for recipe in recipes),
]
