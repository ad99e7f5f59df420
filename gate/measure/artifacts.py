"""Write thumbnails of the worst samples, and golden vectors."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from gate.data.input_binding import InputBinding
from gate.data.samples import SampleSet
from gate.errors import OutputMismatch
from gate.golden.folder import Array, ExpectedOutput, FileVectors, write_golden
from gate.golden.manifest import DType, GoldenManifest, GoldenModel, Origin
from gate.golden.tolerance import Tolerance, tolerances_for, tolerances_of_part
from gate.installation import is_installed
from gate.measure.context import ReferencePass
from gate.measure.job import MeasurementJob
from gate.preprocess.spec import PreprocessSpec, to_pixels
from gate.records.evidence import Evidence, TensorSpec
from gate.reference.environment import deterministic
from gate.statistics.accumulators import interleave
from gate.storage import files

SAMPLES = 8
"""Number of samples in golden vectors; one batch for a file with a fixed batch axis."""

_CHOICE = 4
"""The clearest samples are chosen among this multiple of the required number."""

_RECORDED = ("torch", "torchvision", "onnxruntime", "numpy")


def has_golden(job: MeasurementJob) -> bool:
    """Return False if golden vectors do not support the dtype of an input: strings, bfloat16."""
    parts = job.chained.jobs(job).values() if job.chained else ()
    subjects = [part.candidate.subject for part in (job, *parts)]
    return all(spec.dtype in get_args(DType) for subject in subjects for spec in subject.inputs)


def write_golden_of(folder: Path, job: MeasurementJob, *, evidence: Evidence) -> GoldenManifest:
    """Write golden vectors of the measured file: some samples with the reference's outputs.

    A release gets vectors of the chain and of each part. The samples are spread over the data.
    With logits, samples are preferred whose margin (largest minus second largest logit) exceeds
    twice the tolerance (`gate.golden.tolerance.tolerances_for`), so that the top-1 answer of any
    runtime within the tolerance is the same. The reference is run in a copy; the model and all
    global switches are restored.

    Raises InputMismatch for samples that don't fit, OutputMismatch if reference and file have
    different numbers of outputs, EvidenceError if the reference fails or returns only NaN,
    StorageError.
    """
    versions, code = evidence.environment.versions, evidence.source.code
    parts = {}
    for name, part in (job.chained.jobs(job) if job.chained else {}).items():
        allowed = tolerances_of_part(job.policy, evidence, name)
        file = str(part.candidate.path.relative_to(job.candidate.path.parent))
        parts[name] = _answers(part, allowed, file=file)
    return write_golden(
        folder,
        _answers(job, tolerances_for(job.policy, evidence), file=job.candidate.path.name),
        parts=parts,
        origin=Origin(
            policy_sha256=job.policy.digest(),
            versions={name: versions[name] for name in _RECORDED if name in versions},
            code_sha256=None if code is None else code.digest(),
        ),
    )


def _answers(job: MeasurementJob, allowed: Mapping[str, Tolerance], *, file: str) -> FileVectors:
    """Return the golden vectors of one file. `file`: its name for the record."""
    subject, policy = job.candidate.subject, job.policy
    samples = job.inputs
    binding = job.bind(batch_size=min(SAMPLES, len(samples)))
    names = [spec.name for spec in subject.outputs]
    with deterministic(policy.determinism):
        reference = ReferencePass(job.reference.copy(double=binding.double).session(binding))
        chosen = samples.take(_choose(reference, samples, binding, [allowed[n] for n in names]))
        batch = next(chosen.batches(binding.batch_size))
        outputs = reference.run(batch)
    if len(outputs) != len(names):
        raise OutputMismatch(
            f"the reference returns {len(outputs)} outputs, the file has {len(names)}: {names}. "
            "Export the model again."
        )
    axes, bounds = binding.layout, dict(allowed)
    if axes is not None:
        for name, tolerance in allowed.items():
            if axes.outputs[name] != 0:  # top-1 is only for logits with samples on axis 0
                bounds[name] = replace(tolerance, top1_agreement=None)
    return FileVectors(
        GoldenModel(sha256=subject.sha256, file=file, external_data=subject.external_data),
        binding.by_input(batch),
        {
            name: ExpectedOutput(values, **vars(bounds[name]))
            for name, values in zip(names, binding.to_outputs(outputs), strict=True)
        },
        axes,
    )


def _choose(
    reference: ReferencePass,
    samples: SampleSet,
    binding: InputBinding,
    allowed: Sequence[Tolerance],
) -> list[int]:
    """Return the indices of one batch of samples, clear ones first, spread over the data."""
    size = binding.batch_size
    count = min(_CHOICE * size, len(samples) // size * size)
    spread = np.unique(np.linspace(0, len(samples) - 1, count).astype(int))
    # Every fourth first, then those between, so that the first batch also covers all the data.
    order = [int(index) for start in range(_CHOICE) for index in spread[start::_CHOICE]]
    clear: list[bool] = []
    for batch in samples.take(order).batches(size):
        outputs = reference.run(batch)
        clear += [
            all(_is_clear(values, row, of) for values, of in zip(outputs, allowed, strict=False))
            for row in range(len(next(iter(batch.values()))))
        ]
    ranked = sorted(range(len(order)), key=lambda index: not clear[index])
    return sorted(order[index] for index in ranked[:size])


def _is_clear(values: Array, row: int, allowed: Tolerance) -> bool:
    """Return whether a row has no NaN and, for logits, the same top-1 within the tolerance."""
    if values.dtype.kind != "f" or not values.ndim or row >= len(values):
        return True
    output = values[row].astype(np.float64)
    if np.isnan(output).any():
        return False
    if allowed.top1_agreement is None or output.ndim != 1 or output.size < 2:
        return True
    second, first = np.partition(output, -2)[-2:]
    return bool(first - second > 2.0 * allowed.max_abs_diff)


SIDE = 96
"""Maximum length of the longer side, in pixels."""

MAX_THUMBNAILS = 24
"""Maximum number of pictures in a report, those with the largest differences first."""

_SMALLEST = 4
"""Minimum length of a side in pixels; smaller inputs are signals, not pictures."""

_CHANNELS = (1, 3)


def thumbnails(
    samples: SampleSet, evidence: Evidence, spec: PreprocessSpec | None = None
) -> dict[int, bytes]:
    """Return PNGs of the worst samples, by sample; empty without pictures or without Pillow.

    A picture is a single input, floats of shape (N, C, H, W) or uint8 of shape (N, H, W, C), with
    one or three channels. The normalization of `spec` is inverted; without a matching `spec`, each
    picture is scaled to its range. Raises DataError for samples that can't be read.
    """
    layout = picture_layout(samples.specs)
    if layout is None or not is_installed("PIL"):
        return {}
    (input_spec,) = samples.specs
    fits = spec is not None and _matches(spec, input_spec)
    pictures = {}
    for sample in _worst(evidence, count=len(samples)):
        tensor = samples.at([sample])[input_spec.name][0]
        pixels = (
            np.clip(np.round(np.nan_to_num(to_pixels(tensor, spec))), 0, 255).astype(np.uint8)
            if spec is not None and fits
            else _stretch(tensor, layout)
        )
        pictures[sample] = _png(pixels)
    return pictures


def save(folder: Path, pictures: Mapping[int, bytes]) -> None:
    """Write `<sample>.png` for each. Raises StorageError."""
    for sample, png in pictures.items():
        files.write_bytes(folder / f"{sample}.png", png)


def _worst(evidence: Evidence, *, count: int) -> list[int]:
    """Return the worst samples of all outputs and runtimes, interleaved, without duplicates."""
    lists = [
        [worst.sample for worst in output.worst]
        for runtime in evidence.runtimes
        for output in runtime.outputs
    ]
    return [sample for sample in interleave(lists) if sample < count][:MAX_THUMBNAILS]


def picture_layout(specs: tuple[TensorSpec, ...]) -> str | None:
    """Return the layout of pictures in the single input; None if it has no pictures."""
    if len(specs) != 1 or len(specs[0].shape) != 4:
        return None
    _, first, middle, last = specs[0].shape
    if specs[0].dtype.startswith("float") and first in _CHANNELS:
        layout, sides = "nchw", (middle, last)
    elif specs[0].dtype == "uint8" and last in _CHANNELS:
        layout, sides = "nhwc", (first, middle)
    else:
        return None
    return layout if all(isinstance(n, int) and n >= _SMALLEST for n in sides) else None


def _matches(spec: PreprocessSpec, tensor: TensorSpec) -> bool:
    """Return whether the spec's tensors have this dtype and shape."""
    if spec.dtype != tensor.dtype:
        return False
    shape = tensor.shape[1:]
    return all(expected in (None, size) for expected, size in zip(spec.shape, shape, strict=True))


def _stretch(tensor: NDArray[np.generic], layout: str) -> NDArray[np.uint8]:
    """Return uint8 of shape (height, width, channels); floats are scaled to their range."""
    values = tensor.transpose(1, 2, 0) if layout == "nchw" else tensor
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values, np.uint8)
    numbers = values.astype(np.float64)
    finite = np.isfinite(numbers)
    if not finite.any():
        return np.zeros(numbers.shape, np.uint8)
    low, high = numbers[finite].min(), numbers[finite].max()
    with np.errstate(all="ignore"):
        shares = np.where(finite, numbers, low) / 2.0 - low / 2.0
        scaled = 255.0 * shares / max(high / 2.0 - low / 2.0, np.finfo(np.float64).tiny)
    pixels: NDArray[np.uint8] = np.round(scaled).astype(np.uint8)
    return pixels


def _png(pixels: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    picture.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()
