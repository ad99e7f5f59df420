"""Stage `prepare`: convert images to float32 arrays in two splits, with a manifest of digests."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gate.commands.progress import progress_bar
from gate.commands.result import ExitCode
from gate.errors import DataError
from gate.storage import files as atomic
from gate.storage.digest import Digest
from pipelines import ci_files, paths, stage
from pipelines.images import Source, open_source
from pipelines.params import ModelParams, PrepareParams, load_policy


@ci_files.record_failure("prepare")
def main() -> int:
    """Write data/, reproducibly for equal sources and parameters."""
    params = PrepareParams.load()
    source = open_source(params)
    train, evaluation = split(source.labels, share=params.eval_share, seed=params.seed)
    require_fit(source, len(evaluation), share=params.eval_share)
    with progress_bar("prepare", total=len(source.labels)) as progress:
        for indices, images, labels in (
            (train, paths.TRAIN_IMAGES, paths.TRAIN_LABELS),
            (evaluation, paths.EVAL_IMAGES, paths.EVAL_LABELS),
        ):
            for _ in _write_samples(source, indices, images):
                progress.step(images.name)
            with _npy(labels, np.dtype(np.int64), (len(indices),)) as stream:
                stream.write(source.labels[indices].tobytes())
    _write_pictures(source, evaluation, count=params.pictures)
    params.preprocessing.save(paths.PREPROCESSING)
    _write_manifest(params, source, train=len(train), evaluation=len(evaluation))
    print(
        f"{source.description}: {len(train)} training and {len(evaluation)} evaluation samples "
        f"of {len(source.classes)} classes in {paths.DATA}/"
    )
    return ExitCode.DONE


def split(
    labels: NDArray[np.int64], *, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ascending indices (train, evaluation). Each class is split in the same ratio, by the
    seed.

    Raises DataError for fewer than two classes, or a class with fewer than two samples.
    """
    generator = np.random.default_rng(seed)
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2 or counts.min() < 2:
        raise DataError(
            f"{len(classes)} classes, the smallest with {counts.min()} samples; expected two "
            "classes or more with two samples or more each, so that both splits know every class."
        )
    evaluation = []
    for label, count in zip(classes, counts, strict=True):
        size = min(max(round(share * count), 1), count - 1)
        evaluation.append(generator.permutation(np.flatnonzero(labels == label))[:size])
    eval_indices = np.sort(np.concatenate(evaluation))
    return np.setdiff1d(np.arange(len(labels)), eval_indices), eval_indices


def require_fit(source: Source, evaluation: int, *, share: float) -> None:
    """Check before the training that the data fit the model and the policy.

    Raises DataError if the policy requires more evaluation samples, or the model has another number
    of classes; PolicyError if a section of params.yaml is wrong.
    """
    problems = []
    required = load_policy().min_samples
    if evaluation < required:
        problems.append(
            f"{source.description}: {evaluation} evaluation samples ({share:.0%} of "
            f"{len(source.labels)}), but the policy requires {required} (gate.min_samples), so the "
            "verdict would be ERROR. Add samples, raise prepare.eval_share, or lower "
            "gate.min_samples"
        )
    classes, class_count = ModelParams.load().num_classes, len(source.classes)
    if classes is not None and classes != class_count:
        problems.append(
            f"{source.description}: {class_count} classes, the model has {classes} "
            f"(model.num_classes). Set model.num_classes: {class_count}, or fix the data"
        )
    if problems:
        raise DataError("\n".join(f"{problem}." for problem in problems))


def _write_samples(source: Source, indices: NDArray[np.int64], path: Path) -> Iterator[int]:
    """Write samples one at a time. A full disk would kill the writer of a memory-mapped file."""
    shape = source.sample(int(indices[0])).shape
    with _npy(path, np.dtype(np.float32), (len(indices), *shape)) as stream:
        for index in indices:
            sample = source.sample(int(index))
            if not np.isfinite(sample).all():
                raise DataError(
                    f"{source.description}: sample {index} holds NaN or infinity. "
                    "Fix or remove it, because no result on it can be compared."
                )
            stream.write(sample.tobytes())
            yield int(index)


def _write_pictures(source: Source, evaluation: NDArray[np.int64], *, count: int) -> None:
    """Write evenly spread held-out images as `<index>.png`; none if the source has tensors."""
    written: set[Path] = set()
    paths.PICTURES.mkdir(parents=True, exist_ok=True)
    if source.picture is not None:
        for index in np.unique(np.linspace(0, len(evaluation) - 1, count).astype(int)):
            path = paths.PICTURES / f"{index:05d}.png"
            stream = io.BytesIO()
            Image.fromarray(source.picture(int(evaluation[index]))).save(stream, "PNG")
            atomic.write_bytes(path, stream.getvalue())
            written.add(path)
    for stale in set(paths.PICTURES.glob("*.png")) - written:
        stale.unlink()


@contextmanager
def _npy(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Iterator[BinaryIO]:
    """Open an .npy file in C order that appears only when it is complete."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    with atomic.replacing(path) as temporary, temporary.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        yield stream


def _write_manifest(params: PrepareParams, source: Source, *, train: int, evaluation: int) -> None:
    files = (paths.TRAIN_IMAGES, paths.TRAIN_LABELS, paths.EVAL_IMAGES, paths.EVAL_LABELS)
    manifest = {
        "schema_version": 1,
        "source": source.description,
        "classes": list(source.classes),
        "counts": {"train": train, "eval": evaluation},
        "preprocessing": params.preprocessing.to_plain(),
        "sha256": {file.name: str(Digest.from_file(file)) for file in files},
    }
    atomic.write_text(paths.MANIFEST, json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    stage.run(main)
