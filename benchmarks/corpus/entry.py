"""An entry of the corpus, and the decorator that registers a fault.

@in_layer("missing activation", ("resnet", "stage2.relu1", DIRECT_17))
def activation_left_out(layer: nn.Module, architecture: Architecture) -> nn.Module:
    \"\"\"The exported model has no activation behind a convolution.\"\"\"
    return nn.Identity()
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from torch import nn

from benchmarks.corpus.architecture import ARCHITECTURES, Architecture
from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.exporters import Export, Recipe
from benchmarks.corpus.samples import Arrays

ModelEdit = Callable[[nn.Module, Architecture], nn.Module | None]
"""Changes a copy of the model (or of one layer) in eval mode, or returns what takes its place."""
GraphEdit = Callable[[onnx.ModelProto], None]
FileEdit = Callable[[Path, Bench, Architecture], Callable[[], None] | None]
"""Changes the exported file; what it returns happens while the file is measured."""


@dataclass(frozen=True)
class Entry:
    """One pair of the corpus, made when it is needed."""

    kind: str
    """The class of the fault; `correct` for a correct pair."""
    title: str
    architecture: Architecture
    recipe: Recipe
    summary: str
    make: Callable[[Bench, Path], Pair]
    """Writes the file at the path. Raises ExportRefused."""
    layer: str | None = None
    """Path of the only module that is wrong, where there is one."""
    reach: Callable[[], Arrays] | None = None
    """Inputs on which the fault shows, where the samples don't: what it is judged to be real by.
    The gate does not get them."""

    @property
    def faulty(self) -> bool:
        """True if the file must not pass."""
        return self.kind != CORRECT

    @property
    def name(self) -> str:
        """Unique: `fault/<class>/<title>/<recipe>`, `correct/<architecture>/<recipe>`."""
        parts = [*(["fault"] if self.faulty else []), self.kind, self.title, self.recipe.name]
        return "/".join(part.replace(" ", "-").replace("_", "-") for part in parts)


CORRECT = "correct"
FAULTS: list[Entry] = []
"""All faults, in the order in which the modules of `faults` are read."""


def in_layer(kind: str, *places: tuple[str, str, Recipe]) -> Callable[[ModelEdit], ModelEdit]:
    """A fault of a single layer; a place is (architecture, path of the module, recipe)."""

    def register(edit: ModelEdit) -> ModelEdit:
        for name, layer, recipe in places:
            architecture = ARCHITECTURES[name]

            def whole(
                model: nn.Module, architecture: Architecture, layer: str = layer
            ) -> nn.Module | None:
                replaced = edit(model.get_submodule(layer), architecture)
                if replaced is not None:
                    model.set_submodule(layer, replaced.eval())
                return None

            title = f"{edit.__name__}-{name}-{layer}"
            make = exported_with(whole, architecture, recipe)
            summary = story_of(edit)
            FAULTS.append(Entry(kind, title, architecture, recipe, summary, make, layer))
        return edit

    return register


def in_model(
    kind: str, *places: tuple[str | Architecture, Recipe], layer: str | None = None
) -> Callable[[ModelEdit], ModelEdit]:
    """A fault of the exported model; a place is (architecture, recipe)."""

    def register(edit: ModelEdit) -> ModelEdit:
        for given, recipe in places:
            architecture = ARCHITECTURES[given] if isinstance(given, str) else given
            title = f"{edit.__name__}-{architecture.name}"
            make = exported_with(edit, architecture, recipe)
            FAULTS.append(Entry(kind, title, architecture, recipe, story_of(edit), make, layer))
        return edit

    return register


def in_graph(
    kind: str, *places: tuple[str, Recipe], layer: str | None = None, batch_size: int | None = None
) -> Callable[[GraphEdit], GraphEdit]:
    """A fault of the ONNX graph that the exporter wrote."""

    def register(edit: GraphEdit) -> GraphEdit:
        def edited(path: Path, _bench: Bench, _architecture: Architecture) -> None:
            model = onnx.load(str(path))
            edit(model)
            onnx.save(model, str(path))

        for name, recipe in places:
            architecture = ARCHITECTURES[name]
            make = file_of(edited, architecture, recipe, batch_size=batch_size)
            title = f"{edit.__name__}-{name}"
            FAULTS.append(Entry(kind, title, architecture, recipe, story_of(edit), make, layer))
        return edit

    return register


def in_file(kind: str, *places: tuple[str, Recipe]) -> Callable[[FileEdit], FileEdit]:
    """A fault of the file or of the files beside it."""

    def register(edit: FileEdit) -> FileEdit:
        for name, recipe in places:
            architecture = ARCHITECTURES[name]
            make = file_of(edit, architecture, recipe)
            title = f"{edit.__name__}-{name}"
            FAULTS.append(Entry(kind, title, architecture, recipe, story_of(edit), make))
        return edit

    return register


def as_exported(
    kind: str, *places: tuple[Architecture, Recipe], batch_size: int | None = None
) -> None:
    """What an exporter gets wrong by itself; the story is the model's own docstring."""
    for architecture, recipe in places:
        make = file_of(lambda *_: None, architecture, recipe, batch_size=batch_size)
        title = architecture.name
        summary = story_of(architecture.make)
        FAULTS.append(Entry(kind, title, architecture, recipe, summary, make))


def exported_with(
    edit: ModelEdit, architecture: Architecture, recipe: Recipe
) -> Callable[[Bench, Path], Pair]:
    """Writes the file of a changed copy of the model."""

    def make(bench: Bench, path: Path) -> Pair:
        edited = copy.deepcopy(bench.model(architecture)).requires_grad_(False)
        edited = edit(edited, architecture) or edited
        export = Export(edited, architecture, recipe)
        export.write(path, external=recipe.exporter == "dynamo-external")
        return replace(bench.pair_of(architecture, recipe, path), edited=edited)

    return make


def file_of(
    edit: FileEdit, architecture: Architecture, recipe: Recipe, *, batch_size: int | None = None
) -> Callable[[Bench, Path], Pair]:
    """Writes the file as it is exported, then changes it."""

    def make(bench: Bench, path: Path) -> Pair:
        pair = bench.pair(architecture, recipe, path)
        during = edit(path, bench, architecture)
        return replace(pair, during=during, batch_size=batch_size or pair.batch_size)

    return make


def story_of(of: Callable[..., object]) -> str:
    return " ".join((of.__doc__ or "").split())
