"""An entry of the corpus, and the decorators that register a fault.

@in_layer("missing activation", ("resnet", "stage2.relu1", DIRECT_17))
def activation_left_out(layer: nn.Module, architecture: Architecture) -> nn.Module:
    \"\"\"Remove the activation after a convolution.\"\"\"
    return nn.Identity()
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import onnx
from torch import nn

from benchmarks.corpus.architecture import ARCHITECTURES, Architecture
from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.exporters import Export, Recipe
from benchmarks.corpus.samples import Arrays

ModelEdit = Callable[[nn.Module, Architecture], nn.Module | None]
"""Changes a copy of the model or of one layer in eval mode, or returns a replacement."""
GraphEdit = Callable[[onnx.ModelProto], None]
FileEdit = Callable[[Path, Bench, Architecture], Callable[[], None] | None]
"""Changes the exported file. The returned function is called while the file is measured."""


@dataclass(frozen=True)
class Entry:
    """One pair of the corpus, which is created on demand."""

    kind: str
    """The class of the fault, or `correct` for a correct pair."""
    title: str
    architecture: Architecture
    recipe: Recipe
    summary: str
    make: Callable[[Bench, Path], Pair]
    """Writes the file to the path and returns the pair. Raises ExportRefused."""
    layer: str | None = None
    """Path of the only faulty module, if there is exactly one."""
    reach: Callable[[], Arrays] | None = None
    """Returns inputs on which the fault shows, if no sample shows it. They prove that the fault is
    real; the gate does not get them.
    """

    @property
    def faulty(self) -> bool:
        """Return True if the gate must refuse the file."""
        return self.kind != CORRECT

    @property
    def name(self) -> str:
        """Return the unique name: `fault/<class>/<title>/<recipe>` or
        `correct/<model>/<recipe>`.
        """
        parts = [*(["fault"] if self.faulty else []), self.kind, self.title, self.recipe.name]
        return "/".join(part.replace(" ", "-").replace("_", "-") for part in parts)


CORRECT = "correct"
FAULTS: list[Entry] = []
"""All faults, in the order in which the modules of `faults` are imported."""


def in_layer(kind: str, *targets: tuple[str, str, Recipe]) -> Callable[[ModelEdit], ModelEdit]:
    """Register a fault of a single layer for each (architecture, module path, recipe)."""

    def register(edit: ModelEdit) -> ModelEdit:
        for name, layer, recipe in targets:
            architecture = ARCHITECTURES[name]

            title = f"{edit.__name__}-{name}-{layer}"
            make = edit_then_export(edit_layer(layer, edit), architecture, recipe)
            summary = summary_of(edit)
            FAULTS.append(Entry(kind, title, architecture, recipe, summary, make, layer))
        return edit

    return register


def edit_layer(layer: str, edit: ModelEdit) -> ModelEdit:
    """Return a function that applies the edit to a layer of the model."""

    def edit_model(model: nn.Module, architecture: Architecture) -> None:
        replaced = edit(model.get_submodule(layer), architecture)
        if replaced is not None:
            model.set_submodule(layer, replaced.eval())

    return edit_model


def in_model(
    kind: str, *targets: tuple[str | Architecture, Recipe], layer: str | None = None
) -> Callable[[ModelEdit], ModelEdit]:
    """Register a fault of the exported model for each (architecture, recipe)."""

    def register(edit: ModelEdit) -> ModelEdit:
        for target, recipe in targets:
            architecture = ARCHITECTURES[target] if isinstance(target, str) else target
            title = f"{edit.__name__}-{architecture.name}"
            make = edit_then_export(edit, architecture, recipe)
            FAULTS.append(Entry(kind, title, architecture, recipe, summary_of(edit), make, layer))
        return edit

    return register


def in_graph(
    kind: str, *targets: tuple[str, Recipe], layer: str | None = None, batch_size: int | None = None
) -> Callable[[GraphEdit], GraphEdit]:
    """Register a fault of the exported ONNX graph for each (architecture, recipe)."""

    def register(edit: GraphEdit) -> GraphEdit:
        def edit_file(path: Path, _bench: Bench, _architecture: Architecture) -> None:
            model = onnx.load(str(path))
            edit(model)
            onnx.save(model, str(path))

        for name, recipe in targets:
            architecture = ARCHITECTURES[name]
            make = export_then_edit(edit_file, architecture, recipe, batch_size=batch_size)
            title = f"{edit.__name__}-{name}"
            FAULTS.append(Entry(kind, title, architecture, recipe, summary_of(edit), make, layer))
        return edit

    return register


def in_file(kind: str, *targets: tuple[str, Recipe]) -> Callable[[FileEdit], FileEdit]:
    """Register a fault of the file or its external data for each (architecture, recipe)."""

    def register(edit: FileEdit) -> FileEdit:
        for name, recipe in targets:
            architecture = ARCHITECTURES[name]
            make = export_then_edit(edit, architecture, recipe)
            title = f"{edit.__name__}-{name}"
            FAULTS.append(Entry(kind, title, architecture, recipe, summary_of(edit), make))
        return edit

    return register


def register_exporter_fault(
    kind: str, *targets: tuple[Architecture, Recipe], batch_size: int | None = None
) -> None:
    """Register files that an exporter gets wrong, described by the docstring of the model."""
    for architecture, recipe in targets:
        make = export_then_edit(lambda *_: None, architecture, recipe, batch_size=batch_size)
        title = architecture.name
        summary = summary_of(architecture.make)
        FAULTS.append(Entry(kind, title, architecture, recipe, summary, make))


def correct_entry(architecture: Architecture, recipe: Recipe) -> Entry:
    """Return the pair of an architecture and the file that an exporter writes."""

    def make(bench: Bench, path: Path) -> Pair:
        return bench.pair(architecture, recipe, path)

    summary = f"{architecture.name} as {recipe.exporter} writes it at opset {recipe.opset}."
    return Entry(CORRECT, architecture.name, architecture, recipe, summary, make)


def matching(entries: Iterable[Entry], glob: str | None) -> list[Entry]:
    """Return the entries whose name matches, in order. None selects all."""
    return [entry for entry in entries if glob is None or fnmatch(entry.name, glob)]


def edit_then_export(
    edit: ModelEdit, architecture: Architecture, recipe: Recipe
) -> Callable[[Bench, Path], Pair]:
    """Return a function that exports an edited copy of the model."""

    def make(bench: Bench, path: Path) -> Pair:
        edited = copy.deepcopy(bench.model(architecture)).requires_grad_(False)
        edited = edit(edited, architecture) or edited
        export = Export(edited, architecture, recipe)
        export.write(path, external=recipe.exporter == "dynamo-external")
        return replace(bench.pair_with_file(architecture, recipe, path), edited=edited)

    return make


def export_then_edit(
    edit: FileEdit, architecture: Architecture, recipe: Recipe, *, batch_size: int | None = None
) -> Callable[[Bench, Path], Pair]:
    """Return a function that exports the model and then edits the file."""

    def make(bench: Bench, path: Path) -> Pair:
        pair = bench.pair(architecture, recipe, path)
        during = edit(path, bench, architecture)
        return replace(pair, during=during, batch_size=batch_size or pair.batch_size)

    return make


def summary_of(documented: Callable[..., object]) -> str:
    return " ".join((documented.__doc__ or "").split())
