"""A runtime that returns outputs recorded on another machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gate.errors import DigestMismatch, EvidenceError, InputMismatch, OutputMismatch, PolicyError
from gate.policy.defaults import exact_bounds
from gate.policy.policy import Policy
from gate.policy.runtime_options import UNREPEATED, RecordedOptions, is_recorded
from gate.records.evidence import Subject
from gate.records.runtime import BUILTIN_NAMES, RECORDED, RuntimeName
from gate.runtimes.recording_format import Recording, Rows, digest_of, row_digests
from gate.runtimes.runtime import Conditions, Promises, Proof, RunnableFile, Runtime, Session
from gate.storage.arrays import Batch, RuntimeArray


class RecordedRuntime(Runtime):
    """A runtime that replays one recording."""

    name: ClassVar[RuntimeName] = RECORDED
    promises = Promises(RECORDED, "device")
    options = RecordedOptions
    isolated: ClassVar[bool] = False

    def __init__(self) -> None:
        self.recording: Path | None = None
        """Path of a folder or zip."""

    def absent_reason(self, options: Any) -> str | None:  # noqa: ARG002 - they ask for no device
        """Return the reason if no recording was passed."""
        if self.recording is not None:
            return None
        return (
            "no recording was given. Pass the result of gate record pack: --recorded NAME=FOLDER."
        )

    def open(
        self,
        file: RunnableFile,
        *,
        options: Any,
        conditions: Conditions,  # noqa: ARG002 - nothing is computed here
        example: Batch,
    ) -> Session:
        """Open the recording. Raises EvidenceError if it can't be read.

        Raises DigestMismatch or OutputMismatch if it belongs to another file.
        """
        if self.recording is None:
            raise EvidenceError(str(self.absent_reason(options)))
        recording = Recording(self.recording)
        _check(recording, file.subject, self.recording)
        return RecordedSession(recording, example)


class RecordedSession(Session):
    """Looks up each batch in the recording by the digests of its samples."""

    live = False

    def __init__(self, recording: Recording, example: Batch) -> None:
        self._recording = recording
        self._count = len(recording.rows)
        self._probes = recording.probes
        self._next = 0
        """Index of the first sample that was not yet passed; all before it were, in order."""
        self._example: Rows | None = row_digests(example)

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Return the recorded outputs of these samples.

        Raises InputMismatch if they are neither the next samples of the recording nor samples that
        were passed before.
        """
        rows = row_digests(batch)
        start = self._first_row(rows)
        stop = start + len(rows)
        if self._example is not None and np.array_equal(self._example, rows):
            self._example = None  # it comes before the samples, and contains some of them
        else:
            self._next = max(self._next, stop)
        return self._recorded_outputs("samples", slice(start, stop))

    def has_probe(self, batch: Batch) -> bool:
        """Return whether exactly this batch was recorded as a probe."""
        return digest_of(row_digests(batch)) in self._probes

    def run_probe(self, batch: Batch) -> list[RuntimeArray]:
        """Return the recorded outputs of a probe.

        Raises EvidenceError if the runtime could not compute it.
        """
        part = self._probes[digest_of(row_digests(batch))]
        if part.failed is not None:
            raise EvidenceError(f"it failed where it was recorded: {part.failed}")
        return self._recorded_outputs(part.name, slice(None))

    def proof(self) -> Proof:
        """Return the origin of the outputs as the recording states it.

        Raises InputMismatch if fewer samples were passed than were recorded.
        """
        if self._next < self._count:
            raise InputMismatch(
                f"the recording has {self._count} samples, but only the first {self._next} were "
                "passed. Pass all samples that it was made of."
            )
        whence = self._recording.manifest.whence
        return Proof(
            providers_active=(RECORDED,),
            session_options={
                "recording": str(self._recording.digest),
                "runtime": f"{whence.runtime} {whence.version}",
                "recorded_at": whence.recorded_at,
            },
            versions={whence.runtime: whence.version},
            device=whence.device,
            precision=whence.precision,
        )

    def _recorded_outputs(self, part: str, rows: slice) -> list[RuntimeArray]:
        return [np.array(output[rows]) for output in self._recording.outputs[part]]

    def _first_row(self, rows: Rows) -> int:
        starts = self._row_indices(rows)
        if self._next in starts:
            return self._next
        before = [start for start in starts if start <= self._next]
        if not before:
            raise InputMismatch(self._mismatch_reason(rows))
        if any(self._outputs_differ(before[0], start, len(rows)) for start in before[1:]):
            raise EvidenceError(
                f"samples {before[0]} and {before[-1]} are the same inputs, and the recording has "
                "different outputs for them. Record with a runtime that repeats itself, or leave "
                "one of them out."
            )
        return before[0]

    def _row_indices(self, rows: Rows) -> list[int]:
        recorded, count = self._recording.rows, len(rows)
        last = self._count - count
        starts = np.flatnonzero((recorded[: max(last + 1, 0)] == rows[0]).all(axis=1))
        return [int(s) for s in starts if np.array_equal(recorded[s : s + count], rows)]

    def _outputs_differ(self, first: int, second: int, count: int) -> bool:
        return any(
            output[first : first + count].tobytes() != output[second : second + count].tobytes()
            for output in self._recording.outputs["samples"]
        )

    def _mismatch_reason(self, rows: Rows) -> str:
        """Return why these are not the next samples of the recording."""
        remedy = "Give the samples that it was made of, in their order, or record these."
        for index, row in enumerate(rows, start=self._next):
            if index >= self._count:
                return f"the recording has {self._count} samples, and more were given. {remedy}"
            if np.array_equal(self._recording.rows[index], row):
                continue
            positions = np.flatnonzero((self._recording.rows == row).all(axis=1))
            if len(positions):
                return (
                    f"the samples are in another order than in the recording: sample {index} is "
                    f"its sample {int(positions[0])}. {remedy}"
                )
            return f"sample {index} has other inputs than were recorded. {remedy}"
        return f"these samples were given in another order than they were recorded in. {remedy}"


def with_recordings(policy: Policy, names: Iterable[RuntimeName]) -> Policy:
    """Return the policy with these recordings as required runtimes.

    A recording without an entry gets the built-in bounds of devices. Raises PolicyError if a name
    is that of another runtime, or the policy would be invalid.
    """
    plain, names = policy.to_plain(), tuple(names)
    for name in names:
        is_builtin = name in BUILTIN_NAMES and name != RECORDED
        if is_builtin or (name in policy.runtimes and not is_recorded(policy, name)):
            raise PolicyError(
                f"'{name}' is a runtime that computes here, not a recording. Give the recording "
                "another name, or set kind: recorded in the policy."
            )
        if name not in policy.runtimes:
            bounds = exact_bounds("device", classes=policy.task != "tensors").to_plain()
            plain["runtimes"][name] = {
                "required": "always",
                "kind": RECORDED,
                "options": {"probes": "when_recorded"},
                "bounds": {key: bounds[key] for key in bounds if key not in UNREPEATED},
            }
    try:
        return Policy.from_json(json.dumps(plain))
    except EvidenceError as error:
        raise PolicyError(
            f"the policy with the recordings {', '.join(names)}: {error} Write entries of kind: "
            "recorded with bounds of your own (docs/recorded.md)."
        ) from error


def _check(recording: Recording, subject: Subject, path: Path) -> None:
    manifest = recording.manifest
    remedy = "Record the outputs of this very file."
    if manifest.model_sha256 != subject.sha256:
        raise DigestMismatch(
            f"the recording {path} is of the file {manifest.model_sha256}, this one is "
            f"{subject.sha256}. {remedy}"
        )
    expected = [spec.name for spec in subject.outputs]
    for part in manifest.parts:
        names = [output.name for output in part.outputs]
        if part.outputs and names != expected:
            raise OutputMismatch(
                f"the recording {path} has the outputs {names} of {part.name}, the file has "
                f"{expected}. {remedy}"
            )
