"""Recompute golden vectors on the serving hardware, sandboxed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from gate.errors import (
    EvidenceError,
    OnnxFileError,
    PackageMissing,
    PolicyError,
    StorageError,
    first_line,
)
from gate.golden.folder import (
    Array,
    PartVectors,
    Vectors,
    pictures_problem,
    read_golden,
    record_digest,
)
from gate.golden.manifest import (
    GoldenManifest,
    GoldenModel,
    GoldenOutput,
    GoldenResult,
    OutputResult,
)
from gate.installation import onnx_runtime
from gate.onnx_file.release_file import ReleaseFile
from gate.onnx_file.sessions import open_on_cpu, refuse_out_of_memory
from gate.sandbox.limits import SandboxLimits
from gate.sandbox.process import run_in_sandbox
from gate.storage.arrays import text_digests
from gate.storage.digest import Digest
from gate.storage.files import is_inside, open_plain


def compare(
    vectors: Vectors | PartVectors, computed: Mapping[str, Any]
) -> tuple[OutputResult, ...]:
    """Compare each golden output with the computed output of the same name."""
    return tuple(
        _compare_output(output, vectors.outputs[output.name], computed.get(output.name))
        for output in vectors.golden.outputs
    )


def _compare_output(golden: GoldenOutput, expected: Array, actual: Any) -> OutputResult:
    """Compare one output. Passes only after a comparison of finite numbers: NaN fails."""
    result = OutputResult(name=golden.name, tolerance=golden.max_abs_diff)
    problem = _incomparable(expected, actual)
    if problem is not None:
        return result.model_copy(update={"problem": problem})
    diff = _max_abs_diff(expected, actual)
    agreement = None
    problems = []
    if not (math.isfinite(diff) and diff <= golden.max_abs_diff):
        problems.append(f"max_abs_diff {diff:.3g} is above the tolerance {golden.max_abs_diff:.3g}")
    if golden.top1_agreement is not None:
        agreement = float((np.argmax(expected, axis=1) == np.argmax(actual, axis=1)).mean())
        if not agreement >= golden.top1_agreement:
            problems.append(f"top-1 agreement {agreement:.4g} is below {golden.top1_agreement:.4g}")
    return result.model_copy(
        update={
            "max_abs_diff": diff,
            "top1_agreement": agreement,
            "problem": "; ".join(problems) or None,
        }
    )


def _incomparable(expected: Array, actual: Any) -> str | None:
    """Return why the arrays can't be compared, or None."""
    if not isinstance(actual, np.ndarray):
        return f"is missing, or not a tensor ({type(actual).__name__})"
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"is {actual.dtype} {actual.shape}, expected {expected.dtype} {expected.shape}"
    if actual.dtype.kind == "f":
        differs = np.isnan(actual) != np.isnan(expected)
        if differs.any():
            return f"has {int(differs.sum())} NaN on one side only"
        infinite = np.isinf(actual) | np.isinf(expected)
        if (actual[infinite] != expected[infinite]).any():
            return "is infinite on one side only, or with another sign"
    return None


def _max_abs_diff(expected: Array, actual: Array) -> float:
    """Return the maximum absolute difference of finite elements; 1 if integers differ by less than
    the resolution of float64."""
    is_float = expected.dtype.kind == "f"
    finite = np.isfinite(expected) if is_float else np.ones(expected.shape, np.bool_)
    with np.errstate(all="ignore"):
        diffs = np.abs(expected[finite].astype(np.float64) - actual[finite].astype(np.float64))
    largest = float(diffs.max(initial=0.0))
    return largest or float((expected[finite] != actual[finite]).any())


def verify_golden(
    model_path: Path,
    folder: Path,
    *,
    sha256: Digest | None = None,
    golden_sha256: Digest | None = None,
) -> GoldenResult:
    """Verify that the file is the released one and reproduces the golden vectors in `folder`.

    For a multi-file release, verifies each part. Its chain is code, which is not run.
    sha256, golden_sha256: expected digests of the file and of golden.json, compared before parsing.
    Runs ONNX Runtime on the CPU with all optimizations. A wrong digest, a file that does not load,
    missing or extra outputs, other shapes or dtypes, NaN, and values beyond their tolerance are
    problems of the returned result, which did not pass.

    Raises EvidenceError and DigestMismatch if the vectors are damaged, StorageError if the file
    can't be read, LimitExceeded if it needs more memory than is available.
    """
    mismatch = _wrong_digest(model_path, folder, golden_sha256)
    if mismatch is not None:
        return mismatch
    vectors = read_golden(folder, sha256=golden_sha256)
    digest, model = read_model(model_path, golden=vectors.golden.model)
    expected = vectors.golden.model.sha256
    attempt = _Attempt(vectors, name=model_path.name, digest_text=str(digest))
    problem = _file_mismatch(digest, (sha256, expected), path=model_path)
    if problem is not None:
        problem = "; ".join((problem, *_differing_parts(vectors.golden, model_path)))
    problem = problem or pictures_problem(vectors) or _parts_mismatch(vectors.golden, model_path)
    if problem is not None:
        return attempt.refused(problem)
    outputs: list[OutputResult] = []
    for part, part_vectors in vectors.parts.items():
        computed = _verify_part(part_vectors, release=model_path, attempt=attempt)
        if isinstance(computed, str):
            return attempt.refused(f"part {part}: {computed}")
        outputs += (result.model_copy(update={"part": part}) for result in computed)
    if not vectors.parts:
        computed = _recompute(model, vectors, attempt=attempt)
        if isinstance(computed, str):
            return attempt.refused(computed)
        outputs += computed
    if isinstance(model, Path):  # ONNX Runtime read the external data after it was hashed.
        reread_digest, _ = read_model(model_path, golden=vectors.golden.model)
        if reread_digest != expected:
            return attempt.refused(f"{model_path} changed while it was loaded: {reread_digest}")
    return attempt.compared(tuple(outputs))


class _Attempt:
    """The state of a verification, from which its result is created."""

    def __init__(self, vectors: Vectors, *, name: str, digest_text: str) -> None:
        self.name = name
        self._vectors = vectors
        self._digest = digest_text
        self._version = str(onnx_runtime().__version__)
        self.providers: tuple[str, ...] = ()

    def refused(self, problem: str) -> GoldenResult:
        return self._result((), (problem,))

    def compared(self, outputs: tuple[OutputResult, ...]) -> GoldenResult:
        problems = tuple(
            f"{f'part {o.part}: ' if o.part else ''}output '{o.name}': {o.problem}"
            for o in outputs
            if o.problem
        )
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


def _wrong_digest(model_path: Path, folder: Path, expected: Digest | None) -> GoldenResult | None:
    """Return the result for a golden.json with another digest, without parsing it, or None."""
    digest = None if expected is None else record_digest(folder)
    if digest is None or digest == expected:
        return None
    return GoldenResult(
        passed=False,
        model_sha256=Digest.from_file(model_path),
        golden_sha256=digest,
        samples=0,
        onnxruntime=str(onnx_runtime().__version__),
        problems=(f"the digest of the golden vectors is {digest}, expected {expected}",),
    )


def _file_mismatch(
    digest: Digest, expected: tuple[Digest | None, Digest], *, path: Path
) -> str | None:
    """Return why the digest is not the named one or that of the golden vectors, or None."""
    named, released = expected
    if named not in (None, digest):
        return f"the digest of the file is {digest}, expected {named}"
    if digest != released:
        return (
            f"{path} has digest {digest}, the golden vectors are for {released}: "
            "it is another file, or was changed"
        )
    return None


def _differing_parts(golden: GoldenManifest, path: Path) -> Iterator[str]:
    """Yield a message for each part of a release whose digest differs."""
    for name, part in golden.parts.items():
        file = path.parent / part.model.file
        if file.is_file() and read_model(file, golden=part.model)[0] != part.model.sha256:
            yield f"the file of the part {name} ({part.model.file}) differs"


def _parts_mismatch(golden: GoldenManifest, path: Path) -> str | None:
    """Return why the vectors do not belong to the parts of the release file, or None."""
    if not golden.parts:
        return None
    try:
        actual = {name: part.file for name, part in ReleaseFile.load(path).parts.items()}
    except (PolicyError, OnnxFileError) as error:
        return str(error)
    expected = {name: part.model.file for name, part in golden.parts.items()}
    if {name: PurePosixPath(file) for name, file in actual.items()} != {
        name: PurePosixPath(file) for name, file in expected.items()
    }:
        return f"the release has the parts {actual}, the golden vectors {expected}"
    return None


def _verify_part(
    vectors: PartVectors, *, release: Path, attempt: _Attempt
) -> tuple[OutputResult, ...] | str:
    """Verify one part and recompute its outputs, like `_recompute`."""
    path = release.parent / vectors.golden.model.file
    digest, model = read_model(path, golden=vectors.golden.model)
    problem = _file_mismatch(digest, (None, vectors.golden.model.sha256), path=path)
    return problem or _recompute(model, vectors, attempt=attempt)


def _recompute(
    model: bytes | Path, vectors: Vectors | PartVectors, *, attempt: _Attempt
) -> tuple[OutputResult, ...] | str:
    """Recompute and compare the outputs of one file; return a text if it can't be computed. Raises
    LimitExceeded."""
    try:
        session = open_on_cpu(model)
        attempt.providers = tuple(session.get_providers())
        problem = _names_mismatch(session, vectors)
        if problem is not None:
            return problem
        names = [output.name for output in vectors.golden.outputs]
        outputs = session.run(names, dict(vectors.inputs))
    except PackageMissing:  # Not caused by the file.
        raise
    except Exception as error:
        refuse_out_of_memory(error, what=f"running {attempt.name}")
        return f"ONNX Runtime can't compute it: {type(error).__name__}: {first_line(error)}"
    return compare(vectors, dict(zip(names, map(text_digests, outputs), strict=True)))


def _names_mismatch(session: Any, vectors: Vectors | PartVectors) -> str | None:
    """Return why the names of the file's inputs or outputs are wrong, or None."""
    golden = vectors.golden
    for side, values, tensors in (
        ("inputs", session.get_inputs(), golden.inputs),
        ("outputs", session.get_outputs(), golden.outputs),
    ):
        actual, expected = (sorted(str(each.name) for each in named) for named in (values, tensors))
        if actual != expected:
            return f"the file has the {side} {actual}, the golden vectors {expected}"
    return None


def read_model(path: Path, *, golden: GoldenModel) -> tuple[Digest, bytes | Path]:
    """Return the digest of a file with the external data that `golden` names, and what to load.

    The second value is the hashed content of a single file, or the path of a file with external
    data. The file may have been renamed. Raises StorageError, and EvidenceError if data is outside
    the file's folder.
    """
    if golden.external_data:
        for name in golden.external_data:
            _refuse_outside(path.parent, name)
        main = PurePosixPath(golden.file).name  # The manifest of a part is relative to its folder.
        files = {main: Digest.from_file(path).hex}
        files |= {name: Digest.from_file(path.parent / name).hex for name in golden.external_data}
        return Digest.from_json(files), path
    try:
        with open_plain(path) as stream:
            data = stream.read()
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it does not fit into memory"
        raise StorageError(
            f"cannot read {path}: {reason}. Name the ONNX file of the release."
        ) from error
    return Digest.from_bytes(data), data


def _refuse_outside(folder: Path, name: str) -> None:
    try:
        inside = is_inside(folder, name)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"cannot read {folder / name}: {error}. Fetch the release again."
        ) from error
    if not inside:
        raise EvidenceError(
            f"the data file {name!r} is outside {folder}. Golden vectors must not read other "
            "files of this machine: fetch the release again."
        )


def verify_golden_in_sandbox(
    model_path: Path,
    folder: Path,
    limits: SandboxLimits | None,
    *,
    sha256: Digest | None = None,
    golden_sha256: Digest | None = None,
) -> GoldenResult:
    """Run `verify_golden` in a child process with these limits.

    limits: None for a trusted file, which runs in this process. Also raises LimitExceeded, and
    EvidenceError for an invalid result of the child.
    """
    if limits is None:
        return verify_golden(model_path, folder, sha256=sha256, golden_sha256=golden_sha256)
    digests = {"sha256": sha256, "golden_sha256": golden_sha256}
    arguments = {name: digest and str(digest) for name, digest in digests.items()}
    arguments |= {"model_path": str(model_path), "folder": str(folder)}
    task = f"running {model_path.name}"
    plain = run_in_sandbox(f"{__name__}:verified", arguments, limits=limits, task=task)
    return GoldenResult.from_json(json.dumps(plain))


def loading_problem(path: Path, limits: SandboxLimits | None) -> str | None:
    """Return why ONNX Runtime can't load a file, or None. Without limits, loads it in this process.

    Raises LimitExceeded.
    """
    if limits is None:
        return opened(str(path))
    task = f"loading {path.name}"
    problem = run_in_sandbox(f"{__name__}:opened", {"path": str(path)}, limits=limits, task=task)
    return None if problem is None else str(problem)


def verified(
    model_path: str, folder: str, sha256: str | None, golden_sha256: str | None
) -> dict[str, Any]:
    """Run `verify_golden` in the child process of `verify_golden_in_sandbox`."""
    result = verify_golden(
        Path(model_path), Path(folder), sha256=_digest(sha256), golden_sha256=_digest(golden_sha256)
    )
    return result.to_plain()


def opened(path: str) -> str | None:
    """Load a file in the child process of `loading_problem`."""
    try:
        open_on_cpu(Path(path))
    except PackageMissing:  # Not caused by the file.
        raise
    except Exception as error:
        refuse_out_of_memory(error, what=f"loading {Path(path).name}")
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _digest(text: str | None) -> Digest | None:
    return None if text is None else Digest.parse(text)
