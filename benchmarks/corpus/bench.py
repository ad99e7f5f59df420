"""Create the models, samples and files of the pairs, each once, and cache them for the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.exporters import Export, ExportRefused, Recipe
from benchmarks.corpus.samples import Arrays
from benchmarks.corpus.trained import build_trained
from gate.data.samples import SampleSet
from gate.measure.job import EvaluationData, Reference
from gate.records.evidence import ExportRecord, Source

SAMPLES = 24
BATCH = 8
"""Batch size of the measurement. It differs from that of the export example, which is 4."""


@dataclass(frozen=True)
class Pair:
    """A file and the model that must compute the same outputs."""

    path: Path
    model: nn.Module
    samples: Arrays
    record: ExportRecord
    """The export record."""
    batch_size: int = BATCH
    during: Callable[[], None] | None = None
    """Called after the first batch was measured."""
    edited: nn.Module | None = None
    """The edited model that was exported, if the fault was made in a model."""

    def check_arguments(self) -> dict[str, Any]:
        """Return the reference, the data and the progress callback for `gate.api.check`."""
        callbacks = [self.during] if self.during else []

        def progress(_done: int, _total: int) -> None:
            while callbacks:
                callbacks.pop()()

        samples = SampleSet.from_arrays(self.samples)
        return {
            "reference": Reference(
                self.model, Source(factory="benchmarks.corpus"), export=self.record
            ),
            "data": EvaluationData(samples, batch_size=self.batch_size),
            "progress": progress,
        }


class Bench:
    """Creates and caches models, samples and exported files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[str, nn.Module] = {}
        self._exports: dict[tuple[str, Recipe], Export | ExportRefused] = {}

    def model(self, architecture: Architecture) -> nn.Module:
        """Return the reference model. It is shared: copy it before you change it."""
        if architecture.name not in self._models:
            self._models[architecture.name] = build_trained(architecture)
        return self._models[architecture.name]

    def samples(self, architecture: Architecture) -> Arrays:
        """Return the samples on which both sides are measured."""
        return architecture.draw(architecture.count or SAMPLES, 0)

    def write(self, architecture: Architecture, recipe: Recipe, path: Path) -> None:
        """Write the correct file of a recipe. Raises ExportRefused."""
        is_external = recipe.exporter == "dynamo-external"
        key = (architecture.name, replace(recipe, exporter="dynamo") if is_external else recipe)
        if key not in self._exports:
            try:
                self._exports[key] = Export(self.model(architecture), architecture, recipe)
            except ExportRefused as error:
                self._exports[key] = error
        export = self._exports[key]
        if isinstance(export, ExportRefused):
            raise export
        export.write(path, external=is_external)

    def pair(self, architecture: Architecture, recipe: Recipe, path: Path) -> Pair:
        """Write the correct file of a recipe and return the pair. Raises ExportRefused."""
        self.write(architecture, recipe, path)
        return self.pair_with_file(architecture, recipe, path)

    def pair_with_file(self, architecture: Architecture, recipe: Recipe, path: Path) -> Pair:
        """Return the pair of the reference and an existing file at `path`."""
        return Pair(
            path,
            self.model(architecture),
            self.samples(architecture),
            recipe.record(),
            batch_size=architecture.batch_size or BATCH,
        )
