"""Correct pairs: every architecture with every exporter at several opsets.

If an exporter refuses a model, the pair is listed with the reason and not counted.
"""

from __future__ import annotations

from benchmarks.corpus.architecture import ARCHITECTURES, Architecture, image_architecture
from benchmarks.corpus.entry import Entry, correct_entry
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

_FAULT_MODELS: tuple[tuple[Architecture, tuple[Recipe, ...]], ...] = (
    *(
        (numbers.intensity_architecture(make), (TRACED_13, DIRECT_17, DYNAMO_18))
        for make in (numbers.Standardised, numbers.Logarithmic)
    ),
    *(
        (image_architecture(make), (TRACED_13, DIRECT_17, DYNAMO_18))
        for make in (numbers.Boxes, numbers.Sharp)
    ),
    *(
        (image_architecture(make), (DYNAMO_18,))
        for make in (
            indexing.FloorOfNegatives,
            indexing.NegativeIndices,
            indexing.DuplicatePuts,
            indexing.DuplicateAdds,
            indexing.ThroughAView,
        )
    ),
    (image_architecture(shapes.Halving), (SCRIPTED_17,)),
    (shapes.DARK_IMAGES, (SCRIPTED_17,)),
    (shapes.BAKED_SIZE, (SCRIPTED_17,)),
    (shapes.BAKED_AREA, (SCRIPTED_17,)),
    (shapes.token_architecture(shapes.BakedLength), (SCRIPTED_17,)),
    (shapes.token_architecture(shapes.LongSequences), (SCRIPTED_17,)),
)
"""Models that one exporter gets wrong and another right. Without them, a gate could detect the
fault by refusing the model whatever the file contains.
"""


def is_correct(architecture: Architecture, recipe: Recipe) -> bool:
    """Return False if the exporter is known to silently write a wrong file."""
    if recipe.exporter.startswith("dynamo"):
        return True
    baked = recipe.exporter in ("traced", "direct") and not architecture.traceable
    return not baked and recipe.opset >= architecture.least_opset


CORRECT_PAIRS: list[Entry] = [
    *(
        correct_entry(architecture, recipe)
        for architecture in ARCHITECTURES.values()
        for recipe in RECIPES
        if is_correct(architecture, recipe)
    ),
    *(
        correct_entry(architecture, recipe)
        for architecture, recipes in _FAULT_MODELS
        for recipe in recipes
    ),
]
