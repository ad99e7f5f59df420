"""Measure the difference of preprocessing implementations from Pillow on generated images.

    .venv/bin/python -m benchmarks.preprocess_compare [--images 100] [--output FILE.md]

Compares every implementation of the gate for several specs on the images of
`benchmarks.natural_images`. For the first spec, also compares the predictions of resnet18 with
weights of `benchmarks.torchvision_models`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.natural_images import write_images
from gate.preprocess.comparison import ConsumerSelection, ModelFile, compare_consumers
from gate.preprocess.pictures import pictures_in
from gate.preprocess.spec import PreprocessSpec, Resize
from gate.records.preprocessing import IMPLEMENTATIONS, ConsumerParity, PreprocessingParity
from gate.storage import files
from gate.storage.digest import Digest

SPECS = {
    "ImageNet: shortest side 256, bilinear with antialias, crop 224": PreprocessSpec.imagenet(),
    "A fixed size: 64 x 64, bilinear with antialias": PreprocessSpec(resize=Resize(size=(64, 64))),
    "64 x 64, bicubic with antialias": PreprocessSpec(resize=Resize(size=(64, 64), mode="bicubic")),
    "64 x 64, bilinear without antialias": PreprocessSpec(
        resize=Resize(size=(64, 64), antialias=False)
    ),
    "64 x 64, nearest": PreprocessSpec(
        resize=Resize(size=(64, 64), mode="nearest", antialias=False)
    ),
}
_TABLE_HEADER = (
    "| implementation | max | mean | over 1 step | flips | confidence | within 1/255 | cause |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def main() -> None:
    """Compare all implementations for each spec, print the tables and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/preprocess.md"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pictures = pictures_in(write_images(Path(folder) / "pictures", options.images))
        path = _export_resnet18(Path(folder) / "resnet18.onnx")
        model = ModelFile(path, Digest.from_file(path))
        sections = []
        for title, spec in SPECS.items():
            checked_model = model if spec.size == (224, 224) else None
            selection = ConsumerSelection(tuple(IMPLEMENTATIONS))
            parity = compare_consumers(
                spec, pictures, selection=selection, model=checked_model
            ).parity
            sections.append(_format_section(title, parity))
            print(sections[-1], flush=True)
    files.write_text(options.output, _format_introduction(options.images) + "\n".join(sections))


def _export_resnet18(path: Path) -> Path:
    import torch

    from benchmarks.torchvision_models import build

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            build("resnet18"), (torch.zeros(1, 3, 224, 224),), str(path), dynamo=False,
            opset_version=17, input_names=["input"], output_names=["logits"],
        )  # fmt: skip
    return path


def _format_introduction(images: int) -> str:
    packages = ("pillow", "torchvision", "opencv-python-headless", "onnxruntime-gpu", "torch")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        "# Preprocessing by its implementations\n\n"
        f"Made by `python -m benchmarks.preprocess_compare --images {images}`: generated pictures\n"
        "with the spectrum of photographs, hard edges, fences and text, 97 to 800 pixels. A step\n"
        "is 1/255 of the value range before normalisation: one grey level. Flips and the largest\n"
        "move of the confidence: resnet18 with random weights and calibrated BatchNorm, whose\n"
        "answers are nearly ties, so it flips far more easily than a trained one. The\n"
        "implementations: [docs/preprocessing.md](../docs/preprocessing.md).\n\n"
        f"Versions: {versions}.\n\n"
    )


def _format_section(title: str, parity: PreprocessingParity) -> str:
    rows = "".join(_format_row(consumer) for consumer in parity.consumers)
    return (
        f"## {title}\n\nAgainst {parity.reference}, n = {parity.images}.\n\n{_TABLE_HEADER}{rows}"
    )


def _format_row(consumer: ConsumerParity) -> str:
    return f"| {' | '.join((consumer.consumer, *_format_cells(consumer)))} |\n"


def _format_cells(consumer: ConsumerParity) -> Iterator[str]:
    if consumer.max_diff is None:
        yield from ("", "", "", "", "", "", consumer.not_measured or consumer.failure or "")
        return
    decisions = consumer.decisions
    yield f"{consumer.max_diff:.3g}"
    yield f"{consumer.mean_diff:.3g}"
    yield f"{100 * (consumer.over_one_step or 0.0):.3g} %"
    yield f"{decisions.flips}/{decisions.images}" if decisions else ""
    yield f"{decisions.confidence_diff_max:.2g}" if decisions else ""
    yield "yes" if consumer.within(1.0) else "no"
    explained = f" ({100 * (consumer.explained or 0.0):.3g} %)" if consumer.causes else ""
    yield "; ".join(consumer.causes) + explained


if __name__ == "__main__":
    main()
