"""`gate preprocess compare`, `prepend`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands import click_types as types
from gate.commands.options import MODEL, report_option
from gate.commands.result import CommandResult, ExitCode, machine_options, text_result
from gate.storage import files
from gate.storage.digest import Digest

if TYPE_CHECKING:
    from rich.console import Console

    from gate.preprocess.spec import PreprocessSpec
    from gate.records.preprocessing import PreprocessingParity


_SPEC = click.option(
    "--spec", type=types.SPEC_FILE,
    help="YAML or JSON spec, or a file with a section preprocessing:. "
    "Default: torchvision's ImageNet evaluation.",
)  # fmt: skip


@click.group("preprocess", short_help="Compare implementations of preprocessing.")
def command() -> None:
    """Compare implementations of preprocessing, or add it to the ONNX file.

    \b
    Examples:
      gate preprocess compare photos --spec preprocessing.yaml --model model.onnx
      gate preprocess compare photos --implementations torchvision,onnx --json
      gate preprocess prepend model.onnx --spec preprocessing.yaml --output whole.onnx
    """


@command.command("compare", short_help="Compare implementations of one spec on pictures.")
@click.argument("images", type=types.PICTURES, nargs=-1, required=True)
@_SPEC
@click.option("--model", type=types.ONNX_FILE, help="ONNX classifier: also count top-1 changes.")
@click.option(
    "--implementations", metavar="A,B",
    help="Implementations to compare. Default: all that are installed.",
)  # fmt: skip
@click.option(
    "--tensors", type=types.NAMED_TENSORS, multiple=True, metavar="NAME=FILE.npy",
    help="Tensors that consumer NAME made from the images, on axis 0, in the same order. "
    "Repeatable.",
)  # fmt: skip
@click.option("--reference", help="Reference implementation. Default: pillow.")
@click.option(
    "--bound", type=click.FloatRange(min=0.0), default=1.0, show_default=True,
    help="Largest allowed difference, in 1/255 of the range before normalization.",
)  # fmt: skip
@report_option("Write preprocessing.json and a picture here.")
@machine_options
def _compare(
    images: tuple[Path, ...],
    spec: Path | None,
    model: Path | None,
    implementations: str | None,
    tensors: tuple[tuple[str, Path], ...],
    reference: str | None,
    bound: float,
    report: Path | None,
) -> CommandResult:
    """Compare Pillow, torchvision, OpenCV, ONNX, a browser's canvas and Rust on IMAGES.

    Each implementation is compared with the reference. Known causes of a difference are named: no
    antialias, a half-pixel shift, swapped channels, missing mean or std, a scale of 255. IMAGES are
    files or folders. Pillow decodes them for all implementations.

    Exit code 0: all are within the bound; 1: at least one is not; 2: not compared.

    \b
    Examples:
      gate preprocess compare cat.jpg dog.png
      gate preprocess compare photos --spec preprocessing.yaml --model model.onnx --report report
      gate preprocess compare photos --implementations torchvision,onnx --json
      gate preprocess compare cat.jpg --spec preprocessing.yaml --tensors phone=phone.npy
    """
    from gate.commands.progress import progress_bar
    from gate.onnx_file.reading import read_subject
    from gate.preprocess.comparison import ConsumerSelection, ModelFile, compare_consumers
    from gate.preprocess.pictures import pictures_in, read_dumped_tensors
    from gate.report.comparisons import print_comparison, side_by_side

    stated, dumped = _spec(spec), read_dumped_tensors(tensors)
    selection = ConsumerSelection(_consumers(implementations, dumped), dumped, reference)
    with progress_bar("preprocess") as advance:
        comparison = compare_consumers(
            stated,
            pictures_in(images),
            selection=selection,
            model=None if model is None else ModelFile(model, read_subject(model).sha256),
            advance=advance,
        )
    parity, picture = comparison.parity, None
    if report is not None:
        picture = report / "plots" / "preprocessing.png"
        stated.save(report / "preprocessing-spec.json")
        parity.save(report / "preprocessing.json")
        if comparison.worst_pictures:
            files.write_bytes(picture, side_by_side(comparison.worst_pictures, stated))
    required = (selection.consumers if implementations else ()) + tuple(selection.dumped)
    plain = {
        "spec": stated.to_plain(),
        "bound": bound,
        "within": {c.consumer: c.within(bound) for c in parity.consumers},
        "comparison": parity.to_plain(),
    }

    def show(console: Console) -> None:
        print_comparison(parity, console, bound=bound)
        if picture is not None:
            console.print(f"report  {picture}")

    return CommandResult(_status(parity, bound, required), plain, show)


@command.command("prepend", short_help="Prepend the preprocessing to an ONNX file.")
@MODEL
@_SPEC
@click.option("--output", type=types.NEW_FILE, required=True, help="Output file.")
@machine_options
def _prepend(model: Path, spec: Path | None, output: Path) -> CommandResult:
    """Write MODEL.onnx with the spec prepended: one file from uint8 pictures to outputs.

    Its input `pictures` is uint8 RGB (batch, height, width, 3), of any height and width. The file
    has opset 18 or later. It is a new file: judge it with gate check.

    Exit code 0: written; 2: the spec does not produce the model's input.

    \b
    Examples:
      gate preprocess prepend model.onnx --spec preprocessing.yaml --output whole.onnx
      gate preprocess prepend model.onnx --output whole.onnx --json
    """
    from gate.preprocess.onnx_graph import PICTURES, prepend_graph

    preprocess_spec = _spec(spec)
    prepend_graph(preprocess_spec, model, output)
    sha256 = str(Digest.from_file(output))
    plain = {"output": str(output), "sha256": sha256, "input": PICTURES}
    return text_result(
        {**plain, "spec": preprocess_spec.to_plain()},
        f"written: {output} ({sha256}), input '{PICTURES}'",
    )


def _status(parity: PreprocessingParity, bound: float, required: tuple[str, ...]) -> ExitCode:
    """Return REJECTED if a consumer differs, NOT_JUDGED if a required one or all could not run."""
    ran = [consumer for consumer in parity.consumers if consumer.not_measured is None]
    if not all(consumer.within(bound) for consumer in ran):
        return ExitCode.REJECTED
    missing = [c for c in parity.consumers if c.not_measured is not None and c.consumer in required]
    return ExitCode.NOT_JUDGED if missing or not ran else ExitCode.DONE


def _spec(path: Path | None) -> PreprocessSpec:
    from gate.preprocess.spec import PreprocessSpec

    return PreprocessSpec.from_file(path) if path is not None else PreprocessSpec.imagenet()


def _consumers(named: str | None, dumped: Collection[str]) -> tuple[str, ...]:
    from gate.records.preprocessing import IMPLEMENTATIONS

    if named is not None:
        chosen = tuple(name.strip() for name in named.split(",") if name.strip())
    else:
        chosen = () if dumped else tuple(IMPLEMENTATIONS)
    return tuple(dict.fromkeys((*chosen, *dumped)))
