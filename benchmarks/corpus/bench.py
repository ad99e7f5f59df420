"""Models, samples and files of the pairs, each created once and cached for the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.exporters import Export, ExportRefused, Recipe
from benchmarks.corpus.samples import Arrays
from benchmarks.corpus.trained import trained
from gate.records.evidence import ExportRecord

SAMPLES = 24
BATCH = 8
"""Not the batch size of the export's example, which is 4."""


@dataclass(frozen=True)
class Pair:
    """A file, and the model that it should compute like."""

    path: Path
    model: nn.Module
    samples: Arrays
    record: ExportRecord
    """What is known of the export."""
    batch_size: int = BATCH
    during: Callable[[], None] | None = None
    """Happens after the first batch was measured."""
    edited: nn.Module | None = None
    """The model that was exported instead, where the fault was made in a model."""
    gaps: bool = False
    """True if NaN is an answer of the model."""


class Bench:
    """Makes and keeps models, samples and exported files, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[str, nn.Module] = {}
        self._exports: dict[tuple[str, Recipe], Export | ExportRefused] = {}

    def model(self, architecture: Architecture) -> nn.Module:
        """The trained reference. Shared: copy it before you change it."""
        if architecture.name not in self._models:
            self._models[architecture.name] = trained(architecture)
        return self._models[architecture.name]

    def samples(self, architecture: Architecture) -> Arrays:
        """What both sides compute on."""
        return architecture.draw(architecture.count or SAMPLES, 0)

    def write(self, architecture: Architecture, recipe: Recipe, path: Path) -> None:
        """The correct file of a recipe. Raises ExportRefused."""
        stored = recipe.exporter == "dynamo-external"
        key = (architecture.name, replace(recipe, exporter="dynamo") if stored else recipe)
        if key not in self._exports:
            try:
                self._exports[key] = Export(self.model(architecture), architecture, recipe)
            except ExportRefused as refused:
                self._exports[key] = refused
        export = self._exports[key]
        if isinstance(export, ExportRefused):
            raise export
        export.write(path, external=stored)

    def pair(self, architecture: Architecture, recipe: Recipe, path: Path) -> Pair:
        """The correct pair of a recipe, with the file at `path`. Raises ExportRefused."""
        self.write(architecture, recipe, path)
        return self.pair_of(architecture, recipe, path)

    def pair_of(self, architecture: Architecture, recipe: Recipe, path: Path) -> Pair:
        """The reference and its samples, with the file at `path`, whatever that is."""
        return Pair(
            path,
            self.model(architecture),
            self.samples(architecture),
            recipe.record(),
            batch_size=architecture.batch_size or BATCH,
            gaps=architecture.gaps,
        )
