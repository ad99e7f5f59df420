"""Run all probes: the reference once, then every runtime."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from gate.errors import GateError, RuntimeUnusable
from gate.measure.context import MeasurementContext, ProbeSource
from gate.measure.job import MeasurementJob
from gate.measure.runtime_measurement import MAX_EXAMINED, RuntimeMeasurement
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
from gate.probes.threshold_probes import threshold_probes
from gate.probes.trace_search import TraceSearcher
from gate.probes.value_probes import (
    NEARER_SUFFIX,
    column_probes,
    nearer_probe,
    nonfinite_probes,
    sum_probes,
    value_probes,
)
from gate.records.instruments import TraceSearch
from gate.records.runtime import RuntimeName
from gate.runtimes.recording_format import row_digests
from gate.storage.digest import Digest

_steps = logging.getLogger("gate.steps")


class ProbeInstrument:
    """Runs the probes that the samples and the file's inputs allow."""

    needs_runtimes = True
    title = "probes"

    def __init__(self, context: MeasurementContext) -> None:
        subject = context.tested_file.subject
        self._context = context
        self._profile = SampleProfile.from_source(context)
        self._axes = DynamicAxes.from_file(context, self._profile, context.tested_file)
        self._shared = SampleRuns(context, self._profile.rows)
        self._digests: set[bytes] = set()
        self._examined_counts: Counter[RuntimeName] = Counter()
        """Number of probes that were examined with random rounding."""
        self._search: TraceSearch | None = None
        self.probes = basic_probes(context, self._axes, sha256=subject.sha256)
        self.cost = sum(probe.size for probe in self.probes)

    @staticmethod
    def is_enabled(job: MeasurementJob) -> bool:
        """Return True if the policy enables probes."""
        return job.policy.instruments.probes

    def evidence(self) -> Mapping[str, Any]:
        """Return the result of the search (None without one) and the memory limit per sample."""
        return {"trace_search": self._search, "sample_bytes": self._context.sample_bytes}

    def run(self, runtimes: Sequence[RuntimeMeasurement], advance: Callable[[int], None]) -> None:
        """Compare every runtime with a runner; call `advance` with the size of each probe."""
        if not any(runtime.runner for runtime in runtimes):
            advance(self.cost)
            return
        self._compute_references()
        for probe in self.probes:
            self._compare(probe, runtimes)
            advance(probe.size)
        for probe in self._recorded_probes():
            self._compare(probe, runtimes)
        if not self._context.policy.instruments.search_inputs:
            return
        _steps.debug("look for inputs on which the trace takes another branch")
        self._search, search_probes = TraceSearcher(self._context, self._axes, self.probes).run()
        for probe in search_probes:
            self._compare(probe, runtimes)

    def everything(self) -> Iterator[Probe]:
        """Yield all probes in the order of `run`. Two of them may have the same input."""
        yield from self.probes
        yield from self._recorded_probes()
        if self._context.policy.instruments.search_inputs:
            yield from TraceSearcher(self._context, self._axes, self.probes).run()[1]

    def find(self, name: str) -> Probe | None:
        """Return the probe of this name; None if only the search could make it."""
        probes = chain(self.probes, self._recorded_probes())
        probe = next((p for p in probes if p.name == name.removesuffix(NEARER_SUFFIX)), None)
        if probe is None or probe.name == name:
            return probe
        return nearer_probe(self._profile, probe)

    def _recorded_probes(self) -> Iterator[Probe]:
        """Yield the probes that are made from running the model and recording its operations."""
        yield from integer_probes(self._context, self._profile)
        yield from nonfinite_probes(self._context, self._profile)
        yield from sum_probes(self._context, self._profile)
        yield from length_probes(self._context, self._axes)
        names = {probe.name for probe in self.probes}
        for probe in condition_probes(self._context, self._axes):
            if probe.name not in names:
                yield probe
        yield from threshold_probes(self._context, self._profile, self.probes)

    def _compute_references(self) -> None:
        """Compute the reference of the samples, and of all probes of one sample, in batches.

        Running those probes one by one takes twice as long.
        """
        answers, rows = self._context.answers, self._profile.rows
        with contextlib.suppress(GateError):  # each probe reports it itself
            answers.reference(rows)
            answers.truth(rows)
        if self._profile.fixed:
            return
        shapes = {name: (1, *array.shape[1:]) for name, array in rows.items()}
        single = [probe.batch for probe in self.probes if probe.size == 1]
        alike = [b for b in single if {name: array.shape for name, array in b.items()} == shapes]
        most = min(self._context.binding.batch_size, self._context.part)
        answers.compute_together(alike, most=most)

    def _compare(self, probe: Probe, runtimes: Sequence[RuntimeMeasurement]) -> None:
        """Compare every runtime on a probe, unless an earlier probe had the same input."""
        digest = row_digests(probe.batch).tobytes()
        if digest in self._digests:
            return
        self._digests.add(digest)
        expected = ExpectedOutputs(self._context, probe, self._profile, shared=self._shared)
        beyond_range = []
        for runtime in runtimes:
            if runtime.takes_probe(probe.name, probe.batch):
                compute = partial(runtime.compute, by=SessionRunner.run_probe)
                limit = runtime.examined_limit(self._context.applied_policy)
                try:
                    result = expected.parity(
                        compute,
                        runtime=runtime.name,
                        examine=self._examined_counts[runtime.name] < limit,
                        refused=limit < MAX_EXAMINED,
                    )
                except RuntimeUnusable as error:
                    runtime.fail(error)
                    continue
                runtime.probes.append(result)
                self._examined_counts[runtime.name] += expected.examined
                if result.beyond_range and runtime.runner and runtime.runner.session.live:
                    beyond_range.append(runtime)
        if beyond_range:
            self._compare(nearer_probe(self._profile, probe), beyond_range)


def basic_probes(context: ProbeSource, axes: DynamicAxes, *, sha256: Digest) -> list[Probe]:
    """Return the probes that do not need the model. `sha256`: digest of the file."""
    profile = axes.profile
    return [
        *batch_probes(context, profile, sha256),
        *value_probes(profile),
        *column_probes(profile),
        *size_probes(axes),
    ]
