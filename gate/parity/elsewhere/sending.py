"""Write samples and probes for whoever has to run the file elsewhere."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from gate.errors import StorageError
from gate.onnxfile.candidate import Candidate
from gate.parity.arrays.binding import Binding, bind
from gate.parity.arrays.samples import Samples
from gate.parity.case import Case
from gate.parity.elsewhere.headers import SAMPLES_HEADER, SamplesHeader, SentArray, SentPart
from gate.parity.probes.observed import Observed, Probe
from gate.parity.probes.prober import Prober, plain_probes
from gate.parity.probes.sizes import Axes
from gate.parity.runners.determinism import deterministic
from gate.parity.stand import Stand
from gate.policy.policy import Policy
from gate.runtimes.recording.manifest import SAMPLES
from gate.runtimes.recording.rows import digest_of, row_digests
from gate.runtimes.runtime import Array, Batch
from gate.storage import atomic
from gate.storage.digest import Digest

_ROWS = 64
"""Samples that are held at a time."""


@dataclass(frozen=True)
class Sending:
    """What is to be computed elsewhere."""

    candidate: Candidate
    samples: Samples
    policy: Policy
    model: nn.Module | None = None
    """With it, also the probes that it has to be asked about, or watched for."""
    batch_size: int = 32

    def write(
        self, folder: Path, *, progress: Callable[[int, int], None] | None = None
    ) -> SamplesHeader:
        """Write the folder, which must not be there yet: it appears whole or not at all.

        Raises InputMismatch and DataError for samples that don't fit, EvidenceError where the model
        can't compute them, StorageError.
        """
        if folder.exists():
            raise StorageError(f"{folder} is there already. Name a new folder, or remove it.")
        self.candidate.verify()
        with deterministic(self.policy.determinism):
            stand = self._stand()
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                with atomic.scratch(folder) as room:
                    header = self._written(room, stand, progress)
                    atomic.write_text(room / SAMPLES_HEADER, header.to_json(indent=1) + "\n")
                    room.rename(folder)
            except OSError as error:
                raise StorageError(
                    f"cannot write {folder}: {error.strerror or error}. Free space, or name "
                    "another place."
                ) from error
        return header

    def _written(
        self,
        room: Path,
        stand: Stand | _Material,
        progress: Callable[[int, int], None] | None,
    ) -> SamplesHeader:
        binding, total = stand.binding, len(stand.samples)
        whole = _Writer(room, SAMPLES, SAMPLES)
        for batch in stand.samples.batches(_ROWS):
            whole.add(binding.by_input(batch))
            if progress is not None:
                progress(whole.size, total)
        parts = [whole.part(binding.batch_size if binding.fixed else None)]
        sent = set()
        for probe in self._probes(stand):
            fed = binding.by_input(probe.batch)
            digest = digest_of(row_digests(fed))
            if digest in sent:
                continue
            sent.add(digest)
            writer = _Writer(room, probe.name, f"probes/{len(parts):03}")
            writer.add(fed)
            parts.append(writer.part(writer.size))
        subject = self.candidate.subject
        return SamplesHeader(
            model_sha256=subject.sha256,
            outputs=tuple(spec.name for spec in subject.outputs),
            parts=tuple(parts),
        )

    def _stand(self) -> Stand | _Material:
        subject = self.candidate.subject
        if self.model is None:
            gaps = self.policy.nonfinite == "same_places"
            samples = self.samples.with_gaps() if gaps else self.samples
            binding = bind(
                subject.inputs, samples.specs, count=len(samples), batch_size=self.batch_size
            )
            return _Material(binding, samples, self.policy)
        return Stand.bare(
            Case(self.model, self.candidate, self.samples, self.policy, self.batch_size)
        )

    def _probes(self, stand: Stand | _Material) -> Iterator[Probe]:
        if not self.policy.instruments.probes:
            return
        subject = self.candidate.subject
        if isinstance(stand, Stand):
            yield from Prober(stand, subject.inputs, sha256=subject.sha256).everything()
            return
        axes = Axes.of(stand, Observed.of(stand), subject.inputs)
        yield from plain_probes(stand, axes, sha256=subject.sha256)


@dataclass(frozen=True)
class _Material:
    binding: Binding
    samples: Samples
    policy: Policy


class _Writer:
    """One part, batch by batch."""

    def __init__(self, room: Path, name: str, folder: str) -> None:
        self._room, self._name, self._folder = room, name, folder
        self._rows = hashlib.sha256()
        self._like: Batch = {}
        self.size = 0
        (room / folder).mkdir(parents=True)

    def add(self, batch: Batch) -> None:
        """Append the samples of a batch, by the names of the file's inputs."""
        self._like = batch
        self._rows.update(row_digests(batch).tobytes())
        for number, array in enumerate(batch.values()):
            with (self._room / self._folder / f"{number}.raw").open("ab") as raw:
                raw.write(_little(array).reshape(-1).view(np.uint8).data)
            self.size += len(array) if number == 0 else 0

    def part(self, batch: int | None) -> SentPart:
        """The header, once all is added; the `.npy` files are written from the raw ones."""
        arrays = []
        for number, (name, array) in enumerate(self._like.items()):
            place = f"{self._folder}/{number}"
            shape = (self.size, *array.shape[1:])
            _as_npy(self._room / place, _little(array).dtype, shape)
            arrays.append(
                SentArray(
                    name=name,
                    dtype=array.dtype.name,
                    shape=shape,
                    npy=f"{place}.npy",
                    raw=f"{place}.raw",
                )
            )
        return SentPart(
            name=self._name,
            size=self.size,
            batch=batch,
            inputs_sha256=Digest(self._rows.hexdigest()),
            inputs=tuple(arrays),
        )


def _little(array: Array) -> Array:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def _as_npy(place: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with place.with_suffix(".raw").open("rb") as raw, place.with_suffix(".npy").open("wb") as npy:
        np.lib.format.write_array_header_1_0(npy, header)
        shutil.copyfileobj(raw, npy, 1 << 20)
