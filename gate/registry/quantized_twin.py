"""The int8 twin, stored in the same version as the exact file."""

from __future__ import annotations

import shutil
from pathlib import Path

from gate.errors import EvidenceError, StorageError
from gate.golden.folder import GOLDEN_JSON
from gate.ledger.entry import TwinDigests
from gate.onnx_file.release_file import ReleaseFile, is_release_file
from gate.records.layout import GOLDEN, RECORDS
from gate.registry.release import EvaluatedFile, GoldenFolder
from gate.registry.version_files import Records, twin_file
from gate.sandbox.limits import SandboxLimits


def digests_of(twin: EvaluatedFile) -> TwinDigests:
    """Of a twin as it was opened."""
    return TwinDigests(
        sha256=twin.decision.subject_sha256,
        evidence_sha256=twin.decision.evidence_sha256,
        golden_sha256=twin.golden_sha256,
    )


def write_twin(twin: EvaluatedFile, folder: Path) -> None:
    """Copy a twin into `folder`, as it goes beside the exact file. Raises StorageError."""
    try:
        for name in (twin.onnx_path.name, *twin.evidence.subject.external_data):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(twin.onnx_path.parent / name, target)
        if twin.golden is not None:
            shutil.copytree(twin.golden.path, folder / GOLDEN)
    except OSError as error:
        raise StorageError(
            f"cannot copy the twin {twin.onnx_path} to {folder}: {error.strerror or error}. "
            "Free space or fix permissions, then repeat."
        ) from error
    Records(twin.evidence, twin.decision, twin.statements).write(folder / RECORDS)


def twin_in(folder: Path, digests: TwinDigests | None = None) -> EvaluatedFile:
    """The twin in a folder laid out as above, with these digests where they are pinned.

    Raises EvidenceError where it is not whole, DigestMismatch where evidence or golden vectors
    are others; StorageError.
    """
    path = twin_file(folder)
    evidence = None if digests is None else digests.evidence_sha256
    vectors = None if digests is None else digests.golden_sha256
    records = Records.load(path, evidence=evidence)
    golden = folder / GOLDEN
    there = (golden / GOLDEN_JSON).exists()
    return EvaluatedFile(
        onnx_path=path,
        evidence=records.evidence,
        decision=records.decision,
        statements=records.statements,
        golden=GoldenFolder.open(golden, sha256=vectors) if there else None,
    )


def verify_origin(
    twin: EvaluatedFile, *, exact: EvaluatedFile, limits: SandboxLimits | None
) -> None:
    """A twin is of these very bytes, as its own metadata says; of a release it has the same chain
    and parts, each of which is the exact one of that name or was quantized from it.

    Both are to be verified before. `limits`: as of `Judged.verify`. Raises EvidenceError with the
    name of the part, and as `origin_within`.
    """
    from gate.onnx_file.sandboxed_reading import origin_within

    several = is_release_file(exact.onnx_path)
    if several != is_release_file(twin.onnx_path):
        kinds = [
            "a release of several files" if each else "one file" for each in (several, not several)
        ]
        raise EvidenceError(
            f"{exact.onnx_path} is {kinds[0]}, its twin {twin.onnx_path} is {kinds[1]}. Quantize "
            "what is promoted (gate quantize), and judge that twin."
        )
    if several:
        _verify_parts(twin, exact, limits)
        return
    if twin.onnx_path.suffix != ".onnx":
        raise EvidenceError(
            f"the twin {twin.onnx_path} must have a name that ends in .onnx: rename it, and "
            "judge it again."
        )
    origin = origin_within(twin.onnx_path, limits)
    sha256 = str(exact.evidence.subject.sha256)
    if origin != sha256:
        raise EvidenceError(
            f"the twin {twin.onnx_path} was quantized from {origin or 'an unknown file'}, the "
            f"exact file is {sha256}. Quantize this file (gate quantize), and judge its twin."
        )


def _verify_parts(twin: EvaluatedFile, exact: EvaluatedFile, limits: SandboxLimits | None) -> None:
    from gate.onnx_file.sandboxed_reading import origin_within

    ours, its = (ReleaseFile.load(each.onnx_path) for each in (exact, twin))
    remedy = "Quantize this release (gate quantize), and judge its twin."
    if its.chain != ours.chain:
        raise EvidenceError(
            f"the chain of the twin {twin.onnx_path} is {its.chain}, that of the exact release is "
            f"{ours.chain}. {remedy}"
        )
    for name in sorted({*ours.references} | {*its.references}):
        reference, of_twin = ours.references.get(name), its.references.get(name)
        if reference != of_twin:
            raise EvidenceError(
                f"the part {name} of the twin {twin.onnx_path} computes like "
                f"{of_twin or 'nothing: there is none'}, that of the exact release like "
                f"{reference or 'nothing: there is none'}. {remedy}"
            )
    quantized = False
    for name, part in twin.evidence.subject.parts.items():
        sha256 = exact.evidence.subject.parts[name].sha256
        if part.sha256 == sha256:
            continue
        origin = origin_within(twin.onnx_path.parent / part.file, limits)
        if origin != str(sha256):
            raise EvidenceError(
                f"the part {name} of the twin {twin.onnx_path} was quantized from "
                f"{origin or 'an unknown file'}, the exact part is {sha256}. {remedy}"
            )
        quantized = True
    if not quantized:
        raise EvidenceError(
            f"no part of the twin {twin.onnx_path} is quantized: all are the exact ones. {remedy}"
        )
