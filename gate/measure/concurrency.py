"""Instrument: send the same samples to a server from many concurrent clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gate.measure.context import MeasurementContext
from gate.measure.job import MeasurementJob
from gate.measure.runtime_measurement import RuntimeMeasurement
from gate.measure.stability import StabilityReference
from gate.records.instruments import ConcurrentLoad
from gate.records.runtime import SERVER
from gate.reference.random_rounding import seed
from gate.storage.arrays import OutputArray

_REQUESTS = 96
"""Minimum number of requests per load; there are also at least four per client."""


class ConcurrencyInstrument:
    """Measures `concurrency` of every runtime that accepts concurrent requests.

    It sends the batches of the stability instrument several times in random order. Each result is
    compared with the result for all samples in one batch, in the unit of `batch_invariance_ratio`,
    and with the results for the other samples.
    """

    needs_runtimes = True
    title = "concurrency"
    cost = 0

    def __init__(self, context: MeasurementContext) -> None:
        self._context = context

    @staticmethod
    def is_enabled(job: MeasurementJob) -> bool:
        """Return whether a runtime of the policy is a server."""
        kinds = {runtime.kind or name for name, runtime in job.policy.runtimes.items()}
        return SERVER in kinds and bool(job.policy.instruments.stability_samples)

    def run(self, runtimes: Sequence[RuntimeMeasurement], advance: Callable[[int], None]) -> None:  # noqa: ARG002
        """Measure each load of each server; record a failing server as failed."""
        servers = [each for each in runtimes if each.runner and each.runner.session.connections]
        if not servers:
            return
        reference = StabilityReference(self._context)
        for runtime in servers:
            try:
                runtime.concurrency = tuple(self._loads(reference, runtime))
            except Exception as error:
                runtime.fail(error)

    def evidence(self) -> Mapping[str, Any]:
        """Return nothing: each runtime has its own record."""
        return {}

    def _loads(
        self, reference: StabilityReference, runtime: RuntimeMeasurement
    ) -> Iterator[ConcurrentLoad]:
        assert runtime.runner is not None
        session = runtime.runner.session
        for connections in session.connections:
            yield self._load(reference, runtime, connections, None)
        if session.rate is not None:
            yield self._load(reference, runtime, max(session.connections), session.rate)

    def _load(
        self,
        reference: StabilityReference,
        runtime: RuntimeMeasurement,
        connections: int,
        rate: float | None,
    ) -> ConcurrentLoad:
        assert runtime.runner is not None
        batches = reference.batches
        times = math.ceil(max(_REQUESTS, 4 * connections) / len(batches))
        random = np.random.default_rng(seed(self._context.policy.determinism, connections))
        order = random.permutation(len(batches) * times) % len(batches)
        results, seconds, total = runtime.runner.run_at_once(
            [batches[index].batch for index in order], connections, rate
        )
        outputs: list[list[list[OutputArray]]] = [[] for _ in batches]
        worst, crossed = 0.0, 0
        for index, output in zip(order, results, strict=True):
            part = batches[index]
            if [a.shape for a in output] == [a.shape for a in part.expected]:
                outputs[index].append(output)
            else:  # the result for a batch of another size
                outputs[index].append(part.expected)
                crossed += part.size
        for turn in range(times):
            answers = {id(b.batch): outputs[n][turn] for n, b in enumerate(batches)}

            def recorded(batch: Any, expected: Any, by: Any = answers) -> list[OutputArray]:
                return runtime.compute(batch, expected, by=lambda _runner, fed: by[id(fed)])

            repeated = reference.compare(runtime.compute, run_smaller=recorded, run_again=recorded)
            for parity in repeated:
                ratios = [parity.repeatability_ratio]
                if parity.batch_invariance is not None:  # of several samples
                    ratios.append(parity.batch_invariance_ratio)
                for ratio in ratios:
                    worst = math.nan if ratio is None else max(worst, ratio)
            crossed += sum(
                reference.crossed(part, outputs[n][turn]) for n, part in enumerate(batches)
            )
        milliseconds = 1e3 * np.array(seconds)
        p50, p95, p99 = (float(each) for each in np.percentile(milliseconds, (50, 95, 99)))
        return ConcurrentLoad(
            connections=connections,
            rate=rate,
            requests=len(order),
            batch_invariance_ratio=worst,
            crossed=crossed,
            p50_ms=p50,
            p95_ms=p95,
            p99_ms=p99,
            per_second=len(order) / total,
        )
