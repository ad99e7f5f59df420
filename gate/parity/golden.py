"""Making golden vectors: the reference's answers to a handful of the measured samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gate.errors import OutputMismatch
from gate.golden.folder import Array
from gate.golden.record import Golden, GoldenModel, Origin
from gate.golden.tolerance import Tolerance, tolerances, tolerances_of_part
from gate.golden.writing import ExpectedOutput, FileVectors, write_answers
from gate.parity.arrays.binding import Binding
from gate.parity.arrays.samples import Samples
from gate.parity.case import Case
from gate.parity.runners.determinism import deterministic
from gate.parity.runners.torch_runner import private_copy
from gate.parity.stand import ReferencePass
from gate.records.evidence import Evidence

SAMPLES = 8
"""As many are kept, or one batch of a file with a fixed batch axis."""
_CHOICE = 4
"""Of so many times as many samples the clearest are taken."""
_RECORDED = ("torch", "torchvision", "onnxruntime", "numpy")


def write_golden_of(folder: Path, case: Case, *, evidence: Evidence) -> Golden:
    """Write golden vectors of the measured file: some samples and the reference's outputs; of a
    release those of the chain, and each part's own.

    The samples are spread over the data. Where there are logits, samples come first whose margin
    (largest minus second largest logit) is more than twice the tolerance: a runtime within the
    tolerance can't give them another answer. The tolerances are those of
    `gate.golden.tolerance.tolerances`. The reference is a copy of the model as `measure` makes it;
    the model and all global switches are afterwards as they were.

    Raises InputMismatch for samples that don't fit, OutputMismatch where the reference has another
    number of outputs than the file, EvidenceError where it can't be computed or has only NaN to
    say, StorageError.
    """
    versions, code = evidence.environment.versions, evidence.source.code
    parts = {}
    for name, part in (case.chained.cases(case) if case.chained else {}).items():
        allowed = tolerances_of_part(case.policy, evidence, name)
        file = str(part.candidate.path.relative_to(case.candidate.path.parent))
        parts[name] = _answers(part, allowed, file=file)
    return write_answers(
        folder,
        _answers(case, tolerances(case.policy, evidence), file=case.candidate.path.name),
        parts=parts,
        origin=Origin(
            policy_sha256=case.policy.digest(),
            versions={name: versions[name] for name in _RECORDED if name in versions},
            code_sha256=None if code is None else code.digest(),
        ),
    )


def _answers(case: Case, allowed: Mapping[str, Tolerance], *, file: str) -> FileVectors:
    """`file`: its name for the record."""
    subject, policy = case.candidate.subject, case.policy
    samples = case.inputs
    binding = case.bind(batch_size=min(SAMPLES, len(samples)))
    names = [spec.name for spec in subject.outputs]
    with deterministic(policy.determinism):
        reference = ReferencePass(
            private_copy(case.model, device="cpu", double=binding.double), binding
        )
        chosen = samples.pick(_choose(reference, samples, binding, [allowed[n] for n in names]))
        batch = next(chosen.batches(binding.batch_size))
        outputs = reference.run(batch)
    if len(outputs) != len(names):
        raise OutputMismatch(
            f"the reference returns {len(outputs)} outputs, the file has {len(names)}: {names}. "
            "Export the model again."
        )
    return FileVectors(
        GoldenModel(sha256=subject.sha256, file=file, external_data=subject.external_data),
        binding.by_input(batch),
        {
            name: ExpectedOutput(values, **vars(allowed[name]))
            for name, values in zip(names, outputs, strict=True)
        },
    )


def _choose(
    reference: ReferencePass, samples: Samples, binding: Binding, allowed: Sequence[Tolerance]
) -> list[int]:
    """Places of one batch of samples: the clear ones first, each group spread over the data."""
    size = binding.batch_size
    count = min(_CHOICE * size, len(samples) // size * size)
    spread = np.unique(np.linspace(0, len(samples) - 1, count).astype(int))
    # Every fourth, then those between: the first batch is spread as widely as all are.
    order = [int(place) for start in range(_CHOICE) for place in spread[start::_CHOICE]]
    clear: list[bool] = []
    for batch in samples.pick(order).batches(size):
        outputs = reference.run(batch)
        clear += [
            all(_is_clear(values, row, of) for values, of in zip(outputs, allowed, strict=False))
            for row in range(len(next(iter(batch.values()))))
        ]
    ranked = sorted(range(len(order)), key=lambda index: not clear[index])
    return sorted(order[index] for index in ranked[:size])


def _is_clear(values: Array, row: int, allowed: Tolerance) -> bool:
    """No NaN, and of logits a winner that stays one within the tolerance."""
    if values.dtype.kind != "f" or not values.ndim or row >= len(values):
        return True
    own = values[row].astype(np.float64)
    if np.isnan(own).any():
        return False
    if allowed.top1_agreement is None or own.ndim != 1 or own.size < 2:
        return True
    second, first = np.partition(own, -2)[-2:]
    return bool(first - second > 2.0 * allowed.max_abs_diff)
