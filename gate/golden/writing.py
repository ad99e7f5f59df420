"""Writing golden vectors into a folder, so that a crash leaves whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gate.errors import EvidenceError
from gate.golden.folder import GOLDEN_JSON, SIZE_LIMIT, Array, check_values
from gate.golden.record import Golden, GoldenModel, GoldenOutput, GoldenPart, GoldenTensor, Origin
from gate.policy.sections import NonFinite
from gate.storage import atomic
from gate.storage.digest import Digest


@dataclass(frozen=True)
class ExpectedOutput:
    """An output of the reference, shape (samples, ...), and its tolerances (`GoldenOutput`)."""

    values: Array
    max_abs_diff: float
    top1_agreement: float | None = None
    nonfinite: NonFinite = "refuse"


@dataclass(frozen=True)
class FileVectors:
    """What is written: a file, what it is given and what it must give."""

    model: GoldenModel
    inputs: Mapping[str, Array]
    outputs: Mapping[str, ExpectedOutput]


def write_golden(
    folder: Path,
    *,
    model: GoldenModel,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, ExpectedOutput],
    origin: Origin,
) -> Golden:
    """Write the vectors of one file into `folder`; as `write_answers`."""
    return write_answers(folder, FileVectors(model, inputs, outputs), parts={}, origin=origin)


def write_answers(
    folder: Path, whole: FileVectors, *, parts: Mapping[str, FileVectors], origin: Origin
) -> Golden:
    """Write the vectors into `folder`, which is theirs alone; gives the record. `parts`: of a
    release, whose chain `whole` is.

    The same vectors give the same bytes. Files of data are named by their content and golden.json
    comes last, so a crash leaves the old vectors whole, or the new ones. Raises EvidenceError for
    vectors that could prove nothing: none, empty arrays, NaN where it is not allowed or alone,
    infinite inputs, dtypes that are no plain numbers; StorageError.
    """
    contents: dict[str, bytes] = {}
    try:
        golden = Golden(
            **_described_all(whole, "", contents),
            origin=origin,
            parts={
                name: GoldenPart(**_described_all(part, f"part-{place}-", contents))
                for place, (name, part) in enumerate(parts.items())
            },
        )
    except ValueError as error:
        raise EvidenceError(f"these are no golden vectors: {error}") from error
    if golden.size_bytes > SIZE_LIMIT:
        raise EvidenceError(
            f"these golden vectors have {golden.size_bytes} bytes, at most {SIZE_LIMIT} are read "
            "again. Measure with smaller samples, or another batch size."
        )
    for file, data in contents.items():
        atomic.write_bytes(folder / file, data)
    golden.save(folder / GOLDEN_JSON)
    remove_stale(folder, golden)
    return golden


def _described_all(answers: FileVectors, prefix: str, contents: dict[str, bytes]) -> dict[str, Any]:
    """The fields of the record; the bytes of its arrays go into `contents`."""
    if not answers.inputs or not answers.outputs:
        raise EvidenceError(
            f"{len(answers.inputs)} inputs and {len(answers.outputs)} outputs are no golden "
            "vectors. Give every input and every output of the file."
        )
    given: list[GoldenTensor] = []
    for index, (name, values) in enumerate(answers.inputs.items()):
        check_values(name, values, output=False)
        fields = _described(name, values, f"{prefix}input-{index}", contents)
        given.append(GoldenTensor.model_validate(fields))
    expected: list[GoldenOutput] = []
    for index, (name, output) in enumerate(answers.outputs.items()):
        check_values(name, output.values, output=True, nonfinite=output.nonfinite)
        fields = _described(name, output.values, f"{prefix}output-{index}", contents)
        fields |= {"max_abs_diff": output.max_abs_diff, "nonfinite": output.nonfinite}
        fields |= {"top1_agreement": output.top1_agreement}
        expected.append(GoldenOutput.model_validate(fields))
    return {
        "model": answers.model,
        "samples": len(next(iter(answers.inputs.values()))),
        "inputs": tuple(given),
        "outputs": tuple(expected),
    }


def remove_stale(folder: Path, golden: Golden) -> None:
    """Take away arrays and pictures that these vectors do not name."""
    for pattern in ("*.bin", "*.png"):
        for path in folder.glob(pattern):
            if path.name not in golden.files:
                path.unlink(missing_ok=True)


def _described(
    name: str, values: Array, prefix: str, contents: dict[str, bytes]
) -> dict[str, object]:
    """The fields of the array's record; its bytes go into `contents`."""
    data = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()
    digest = Digest.of_bytes(data)
    file = f"{prefix}-{digest.short}.bin"
    contents[file] = data
    return {
        "name": name,
        "dtype": values.dtype.name,
        "shape": tuple(int(size) for size in values.shape),
        "file": file,
        "sha256": digest,
    }
