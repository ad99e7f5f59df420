"""Run all probes: the reference once, then every runtime."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from gate.errors import GateError
from gate.measure.context import MeasurementContext, ProbeSource
from gate.measure.job import MeasurementJob
from gate.measure.runtime_measurement import Track
from gate.measure.session_runner import SessionRunner
from gate.probes.expected_outputs import ExpectedOutputs, SampleRuns
from gate.probes.integer_probes import integer_probes
from gate.probes.probe import Probe, SampleProfile
from gate.probes.size_probes import (
    DynamicAxes,
    batch_probes,
    condition_probes,
    length_probes,
    size_probes,
)
from gate.probes.trace_search import TraceSearcher
from gate.probes.value_probes import (
    NEARER_SUFFIX,
    column_probes,
    nearer_probe,
    nonfinite_probes,
    value_probes,
)
from gate.records.instruments import TraceSearch
from gate.records.runtime import RuntimeName
from gate.runtimes.recording_format import row_digests
from gate.storage.digest import Digest

_steps = logging.getLogger("gate.steps")


class ProbeInstrument:
    """The probes that the stand's samples and the file's inputs give."""

    needs_runtimes = True
    title = "probes"

    def __init__(self, stand: MeasurementContext) -> None:
        subject = stand.tested_file.subject
        self._stand = stand
        self._observed = SampleProfile.of(stand)
        self._axes = DynamicAxes.of(stand, self._observed, subject.inputs)
        self._shared = SampleRuns(stand, self._observed.rows)
        self._digests: set[bytes] = set()
        self._examined: Counter[RuntimeName] = Counter()
        """Probes that got a second look."""
        self._search: TraceSearch | None = None
        self.probes = basic_probes(stand, self._axes, sha256=subject.sha256)
        self.cost = sum(probe.size for probe in self.probes)

    @staticmethod
    def is_enabled(job: MeasurementJob) -> bool:
        """Return True if the policy asks for probes."""
        return job.policy.instruments.probes

    def evidence(self) -> Mapping[str, Any]:
        """Return what the search for more probes saw, None without it, or without a runtime; and
        the memory by which probes were made smaller."""
        return {"trace_search": self._search, "sample_bytes": self._stand.sample_bytes}

    def run(self, tracks: Sequence[Track], advance: Callable[[int], None]) -> None:
        """Judge every track that has a runner; `advance` gets the samples of each probe."""
        if not any(track.runner for track in tracks):
            advance(self.cost)
            return
        self._compute_in_float64()
        for probe in self.probes:
            self._judge(probe, tracks)
            advance(probe.size)
        for probe in self._further():
            self._judge(probe, tracks)
        if not self._stand.policy.instruments.search_inputs:
            return
        _steps.debug("look for inputs on which the trace takes another branch")
        self._search, more = TraceSearcher(self._stand, self._axes, self.probes).run()
        for probe in more:
            self._judge(probe, tracks)

    def everything(self) -> Iterator[Probe]:
        """The probes that `run` judges by, in its order; some may have the input of another."""
        yield from self.probes
        yield from self._further()
        if self._stand.policy.instruments.search_inputs:
            yield from TraceSearcher(self._stand, self._axes, self.probes).run()[1]

    def named(self, name: str) -> Probe | None:
        """The probe of this name, without the search for more; None: it is none of the others."""
        made = chain(self.probes, self._further())
        found = next((p for p in made if p.name == name.removesuffix(NEARER_SUFFIX)), None)
        if found is None or found.name == name:
            return found
        return nearer_probe(self._observed, found)

    def _further(self) -> Iterator[Probe]:
        """What the model itself has to be asked about, or watched for."""
        yield from integer_probes(self._stand, self._observed)
        yield from nonfinite_probes(self._stand, self._observed)
        yield from length_probes(self._stand, self._axes)
        named = {probe.name for probe in self.probes}
        for probe in condition_probes(self._stand, self._axes):
            if probe.name not in named:
                yield probe

    def _compute_in_float64(self) -> None:
        """The samples that batches are made of, and what changes a lone sample's values, together:
        batches of one cost twice as much."""
        answers, rows = self._stand.answers, self._observed.rows
        with contextlib.suppress(GateError):  # each probe says so itself
            answers.reference(rows)
            answers.truth(rows)
        if self._observed.fixed:
            return
        shapes = {name: (1, *array.shape[1:]) for name, array in rows.items()}
        alone = [probe.batch for probe in self.probes if probe.size == 1]
        alike = [b for b in alone if {name: array.shape for name, array in b.items()} == shapes]
        most = min(self._stand.binding.batch_size, self._stand.part)
        answers.ask_together(alike, most=most)

    def _judge(self, probe: Probe, tracks: Sequence[Track]) -> None:
        """An input that another probe had already is not computed again."""
        digest = row_digests(probe.batch).tobytes()
        if digest in self._digests:
            return
        self._digests.add(digest)
        expected = ExpectedOutputs(self._stand, probe, self._observed, shared=self._shared)
        breaking = []
        for track in tracks:
            if track.takes_probe(probe.name, probe.batch):
                compute = partial(track.compute, by=SessionRunner.run_probe)
                examine = self._examined[track.name] < track.looks(self._stand.applied_policy)
                found = expected.parity(compute, runtime=track.name, examine=examine)
                track.probes.append(found)
                self._examined[track.name] += expected.examined
                if track.probes[-1].beyond_range and track.runner and track.runner.live:
                    breaking.append(track)
        if breaking:
            self._judge(nearer_probe(self._observed, probe), breaking)


def basic_probes(stand: ProbeSource, axes: DynamicAxes, *, sha256: Digest) -> list[Probe]:
    """Those that the samples and the file's inputs give, without the model. `sha256`: the
    file's."""
    observed = axes.observed
    return [
        *batch_probes(stand, observed, sha256),
        *value_probes(observed),
        *column_probes(observed),
        *size_probes(axes),
    ]
