"""Computing golden vectors again, on the hardware that will serve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gate.errors import EvidenceError, StorageError, first_line
from gate.golden.folder import Array, Vectors, read_golden, record_digest
from gate.golden.pictures import wrong_pictures
from gate.golden.record import GoldenModel, GoldenOutput, GoldenResult, OutputResult
from gate.onnxfile.session import open_on_cpu, refuse_out_of_memory
from gate.storage.digest import Digest
from gate.storage.files import is_inside, open_plain


def verify_golden(
    model_path: Path,
    folder: Path,
    *,
    sha256: Digest | None = None,
    golden_sha256: Digest | None = None,
) -> GoldenResult:
    """Prove that the file is the released one and computes what the vectors in `folder` say.

    `sha256` and `golden_sha256`: the digests that the file and golden.json must have, compared
    before either is parsed. Runs ONNX Runtime on the CPU with all optimisations. Whatever is wrong
    with the file is a returned result that did not pass: another digest, a file that does not load,
    missing or extra outputs, other shapes or dtypes, NaN, values beyond their tolerance.

    Raises EvidenceError and DigestMismatch where the vectors themselves are not whole, StorageError
    where the file can't be read, and LimitExceeded where it takes more memory than there is.
    """
    other = _other_vectors(model_path, folder, golden_sha256)
    if other is not None:
        return other
    vectors = read_golden(folder, sha256=golden_sha256)
    digest, model = read_model(model_path, like=vectors.golden.model)
    expected = vectors.golden.model.sha256
    attempt = _Attempt(vectors, digest_text=str(digest))
    problem = _other_file(digest, (sha256, expected), path=model_path) or wrong_pictures(vectors)
    if problem is not None:
        return attempt.refused(problem)
    try:
        session = open_on_cpu(model)
        attempt.providers = tuple(session.get_providers())
        problem = _other_names(session, vectors)
        if problem is not None:
            return attempt.refused(problem)
        names = [output.name for output in vectors.golden.outputs]
        computed = dict(zip(names, session.run(names, dict(vectors.inputs)), strict=True))
    except Exception as error:
        refuse_out_of_memory(error, what=f"running {model_path.name}")
        reason = f"{type(error).__name__}: {first_line(error)}"
        return attempt.refused(f"ONNX Runtime can't compute it: {reason}")
    if isinstance(model, Path):  # the data files were read by ONNX Runtime, not by us
        again, _ = read_model(model_path, like=vectors.golden.model)
        if again != expected:
            return attempt.refused(f"{model_path} changed while it was loaded: {again}")
    return attempt.compared(compare(vectors, computed))


def compare(vectors: Vectors, computed: Mapping[str, Any]) -> tuple[OutputResult, ...]:
    """Each golden output beside the computed one of the same name."""
    return tuple(
        _compared(output, vectors.outputs[output.name], computed.get(output.name))
        for output in vectors.golden.outputs
    )


class _Attempt:
    """What is known so far, and the result that it makes."""

    def __init__(self, vectors: Vectors, *, digest_text: str) -> None:
        import onnxruntime

        self._vectors = vectors
        self._digest = digest_text
        self._version = str(onnxruntime.__version__)
        self.providers: tuple[str, ...] = ()

    def refused(self, problem: str) -> GoldenResult:
        return self._result((), (problem,))

    def compared(self, outputs: tuple[OutputResult, ...]) -> GoldenResult:
        problems = tuple(f"output '{o.name}': {o.problem}" for o in outputs if o.problem)
        return self._result(outputs, problems)

    def _result(self, outputs: tuple[OutputResult, ...], problems: tuple[str, ...]) -> GoldenResult:
        return GoldenResult.model_validate(
            {
                "passed": bool(outputs) and not problems,
                "model_sha256": self._digest,
                "golden_sha256": self._vectors.sha256,
                "samples": self._vectors.golden.samples,
                "onnxruntime": self._version,
                "providers": self.providers,
                "outputs": outputs,
                "problems": problems,
            }
        )


def _other_vectors(model_path: Path, folder: Path, expected: Digest | None) -> GoldenResult | None:
    """The result where golden.json is not the one that was named, without a look into it."""
    digest = None if expected is None else record_digest(folder)
    if digest is None or digest == expected:
        return None
    import onnxruntime

    return GoldenResult(
        passed=False,
        model_sha256=Digest.of_file(model_path),
        golden_sha256=digest,
        samples=0,
        onnxruntime=str(onnxruntime.__version__),
        problems=(f"the digest of the golden vectors is {digest}, expected {expected}",),
    )


def _other_file(
    digest: Digest, expected: tuple[Digest | None, Digest], *, path: Path
) -> str | None:
    """Why these are not the bytes that were named, nor those of the vectors; or None."""
    named, released = expected
    if named not in (None, digest):
        return f"the digest of the file is {digest}, expected {named}"
    if digest != released:
        return (
            f"{path} has digest {digest}, the golden vectors are for {released}: "
            "it is another file, or was changed"
        )
    return None


def _other_names(session: Any, vectors: Vectors) -> str | None:
    """What is wrong with the file's inputs or outputs, or None."""
    golden = vectors.golden
    for side, got, want in (
        ("inputs", session.get_inputs(), golden.inputs),
        ("outputs", session.get_outputs(), golden.outputs),
    ):
        actual, expected = _sorted(got), _sorted(want)
        if actual != expected:
            return f"the file has the {side} {actual}, the golden vectors {expected}"
    return None


def _sorted(values: Sequence[Any]) -> list[str]:
    return sorted(str(value.name) for value in values)


def _compared(golden: GoldenOutput, want: Array, got: Any) -> OutputResult:
    """Written so that only a comparison that was made, of finite numbers, can pass."""
    result = OutputResult(name=golden.name, tolerance=golden.max_abs_diff)
    problem = _other_kind(want, got)
    if problem is not None:
        return result.model_copy(update={"problem": problem})
    diff = _max_abs_diff(want, got)
    agreement = None
    problems = []
    if not (math.isfinite(diff) and diff <= golden.max_abs_diff):
        problems.append(f"max_abs_diff {diff:.3g} is above the tolerance {golden.max_abs_diff:.3g}")
    if golden.top1_agreement is not None:
        agreement = float((np.argmax(want, axis=1) == np.argmax(got, axis=1)).mean())
        if not agreement >= golden.top1_agreement:
            problems.append(f"top-1 agreement {agreement:.4g} is below {golden.top1_agreement:.4g}")
    return result.model_copy(
        update={
            "max_abs_diff": diff,
            "top1_agreement": agreement,
            "problem": "; ".join(problems) or None,
        }
    )


def _other_kind(want: Array, got: Any) -> str | None:
    """Why the two can't be compared, or None."""
    if not isinstance(got, np.ndarray):
        return f"is missing, or no tensor ({type(got).__name__})"
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"is {got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
    if got.dtype.kind == "f":
        other = np.isnan(got) != np.isnan(want)
        if other.any():
            return f"has {int(other.sum())} NaN values in other places than the vectors"
        infinite = np.isinf(got) | np.isinf(want)
        if (got[infinite] != want[infinite]).any():
            return "is infinite on one side only, or with another sign"
    return None


def _max_abs_diff(want: Array, got: Array) -> float:
    """Over the finite elements; equal infinities are equal. A difference of integers that float64
    can't tell counts as 1."""
    finite = np.isfinite(want) if want.dtype.kind == "f" else np.ones(want.shape, np.bool_)
    with np.errstate(all="ignore"):
        diffs = np.abs(want[finite].astype(np.float64) - got[finite].astype(np.float64))
    largest = float(diffs.max(initial=0.0))
    return largest or float((want[finite] != got[finite]).any())


def read_model(path: Path, *, like: GoldenModel) -> tuple[Digest, bytes | Path]:
    """Digest of the file at `path`, with the external data that `like` names, and what to load.

    A single file is given as the very bytes that were hashed. The name of the model file itself
    does not matter. Raises StorageError, and EvidenceError where data lies outside of the file's
    folder.
    """
    if like.external_data:
        for name in like.external_data:
            _refuse_outside(path.parent, name)
        files = {like.file: Digest.of_file(path).hex}
        files |= {name: Digest.of_file(path.parent / name).hex for name in like.external_data}
        return Digest.of_json(files), path
    try:
        with open_plain(path) as stream:
            data = stream.read()
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or str(error) or "it does not fit into memory"
        raise StorageError(
            f"cannot read {path}: {why}. Name the ONNX file of the release."
        ) from error
    return Digest.of_bytes(data), data


def _refuse_outside(folder: Path, name: str) -> None:
    try:
        inside = is_inside(folder, name)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"cannot read {folder / name}: {error}. Fetch the release again."
        ) from error
    if not inside:
        raise EvidenceError(
            f"the data file {name!r} lies outside of {folder}. Golden vectors must not read other "
            "files of this machine: fetch the release again."
        )
