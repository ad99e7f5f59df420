"""What a check computes on: samples, labels, pictures, recordings; and who does most of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.decision.champion import Champion
from gate.parity.arrays.labels import open_labels
from gate.parity.arrays.samples import Samples
from gate.parity.units.part import Crew
from gate.parity.units.unit import MOST
from gate.preprocess.spec import PreprocessSpec
from gate.records.runtime import RuntimeName
from gate.storage.digest import Digest


@dataclass(frozen=True)
class SamplesOrigin:
    """What `Workload.open` was given."""

    inputs: str
    labels: Path | None = None
    preprocessing: Path | None = None

    @classmethod
    def of(
        cls, inputs: Path | str, *, labels: Path | None, preprocessing: Path | None
    ) -> SamplesOrigin:
        """As text, because it may be a URL or a data set by name."""
        return cls(str(inputs), labels, preprocessing)


@dataclass(frozen=True)
class Workload:
    """What both sides compute on."""

    samples: Samples
    labels: NDArray[np.int64] | None = None
    """Class indices, shape (samples,)."""
    labels_sha256: Digest | None = None
    batch_size: int = 32
    pictures: tuple[Path, ...] = ()
    """Files or folders on which parity of preprocessing is measured, if the policy demands it."""
    dumped: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """By consumer of one's own, what it made of these pictures: one tensor each, on axis 0."""
    recordings: Mapping[RuntimeName, Path] = field(default_factory=dict)
    """What was computed elsewhere on these samples, by the name of its runtime: what `gate record
    pack` made."""
    against: Champion | None = None
    """The version that serves now, which computes on the same samples, too."""
    spec: PreprocessSpec | None = None
    """How pictures became the samples, where that was given with them."""
    origin: SamplesOrigin | None = None
    """From where other processes can open the samples again."""
    units: int = MOST
    """Into how many it is cut at most (`gate.parity.units.unit`)."""
    crew: Crew | None = None
    """Who measures most of the samples, in other processes; the numbers are the same without."""

    @classmethod
    def open(
        cls,
        inputs: Path | str,
        *,
        labels: Path | None = None,
        batch_size: int = 32,
        preprocessing: Path | None = None,
        decode_workers: int | None = 0,
    ) -> Workload:
        """Open samples from a file, a folder, a URL or a data set (`Samples.open`), and labels from
        an `.npy`; else those of the source, if it has any.

        `preprocessing`: the spec by which its pictures become inputs. `decode_workers`: processes
        that read ahead; a script that asks for some needs `if __name__ == "__main__":`. Raises
        DataError, StorageError, PolicyError.
        """
        spec = PreprocessSpec.of_file(preprocessing) if preprocessing else None
        samples = Samples.open(inputs, preprocessing=spec, decode_workers=decode_workers)
        origin = SamplesOrigin.of(inputs, labels=labels, preprocessing=preprocessing)
        opened = cls(samples, batch_size=batch_size, spec=spec, origin=origin)
        if labels is not None:
            correct_classes = open_labels(labels, samples=len(samples))
            return replace(opened, labels=correct_classes, labels_sha256=Digest.of_file(labels))
        own = samples.labels()
        if own is None:
            return opened
        return replace(opened, labels=own, labels_sha256=Samples.of({"label": own}).digest())
