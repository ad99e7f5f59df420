"""The verdict as numbers in OpenMetrics: for Prometheus and GitLab's metrics reports.

All are gauges with names that older readers take too, such as node_exporter's textfile collector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from gate.decision.checks import Verdict
from gate.report.ci import CiResult
from gate.report.junit import MEASUREMENT
from gate.story.story import Story, Word
from gate.story.wording import printable

_CHECK = ("part", "runtime", "output", "check", "point")
_DECISIVE = (Verdict.PASS, Verdict.FAIL, Verdict.ERROR)


def openmetrics(result: CiResult) -> str:
    """The text, ending with `# EOF`. Every series has the label `model`; docs/ci.md lists them."""

    class Numbers(Collector):
        """Those of this result."""

        def collect(self) -> Iterator[GaugeMetricFamily]:
            model = printable(result.subject)
            yield from _of_result(result, model)
            if result.story is not None:
                yield from _of_file(result.story, model)
                yield from _of_runtimes(result.story, model)
                yield from _of_checks(result.story, model)

    registry = CollectorRegistry()
    registry.register(Numbers())
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]  # it has no types
    return text.decode()


def _gauge(name: str, help_text: str, *labels: str, unit: str = "") -> GaugeMetricFamily:
    return GaugeMetricFamily(f"parity_gate_{name}", help_text, labels=("model", *labels), unit=unit)


def _of_result(result: CiResult, model: str) -> Iterator[GaugeMetricFamily]:
    code = _gauge(
        "exit_code", "Of the command: 0 passed, 1 rejected, 2 could not judge.", "command"
    )
    code.add_metric((model, result.command), result.exit_code)
    yield code
    verdict = _gauge("verdict", "1 for the verdict on the file, 0 for the others.", "verdict")
    for each in _DECISIVE:
        verdict.add_metric((model, each.value), float(each is result.verdict))
    yield verdict


def _of_file(story: Story, model: str) -> Iterator[GaugeMetricFamily]:
    subject = story.subject
    file = _gauge("file", "1; which file was judged, by which policy.", "sha256", "policy")
    file.add_metric((model, str(subject.sha256), str(subject.policy_sha256 or "")), 1)
    yield file
    samples = _gauge("samples", "Samples that it was judged on.")
    samples.add_metric((model,), subject.samples)
    yield samples
    size = _gauge("file_size", "Of the file with its external data.", unit="bytes")
    size.add_metric((model,), subject.size_bytes)
    yield size
    for name, text in (("measured", subject.measured_at), ("decided", subject.decided_at)):
        seconds = _seconds(text)
        if seconds is not None:
            gauge = _gauge(f"{name}_timestamp", f"When it was {name}, since 1970.", unit="seconds")
            gauge.add_metric((model,), seconds)
            yield gauge


def _of_runtimes(story: Story, model: str) -> Iterator[GaugeMetricFamily]:
    passed = _gauge(
        "runtime_passed", "1 where every check of the runtime held.", "runtime", "state"
    )
    agreement = _gauge(
        "top1_agreement", "Lowest judged agreement of classes.", "runtime", unit="ratio"
    )
    latency = _gauge("batch_latency", "Median time of a batch.", "runtime", unit="seconds")
    for row in story.proof:
        name = printable(row.runtime)
        passed.add_metric((model, name, row.state), float(row.state == "passed"))
        if row.agreement is not None:
            agreement.add_metric((model, name), row.agreement)
        if row.latency_ms is not None:
            latency.add_metric((model, name), row.latency_ms / 1e3)
    yield from (passed, agreement, latency)


def _of_checks(story: Story, model: str) -> Iterator[GaugeMetricFamily]:
    counts = Counter(
        (word.check.runtime or MEASUREMENT, word.check.verdict.value) for word in story.words
    )
    count = _gauge("checks", "Checks by their verdict.", "runtime", "verdict")
    for (runtime, verdict), number in counts.items():
        count.add_metric((model, printable(runtime), verdict), number)
    yield count
    observed = _gauge("check_observed", "What a check saw, in its own unit.", *_CHECK)
    bound = _gauge("check_bound", "What is allowed, in the same unit.", *_CHECK)
    used = _gauge(
        "check_used", "How much of its bound a check has used: 1 at it.", *_CHECK, unit="ratio"
    )
    for labels, word in _once(story):
        check = word.check
        for gauge, value in (
            (observed, check.observed),
            (bound, check.bound),
            (used, word.strain),
        ):
            if isinstance(value, float):
                gauge.add_metric((model, *labels), value)
    yield from (observed, bound, used)


def _once(story: Story) -> Iterator[tuple[tuple[str, ...], Word]]:
    """The checks by their labels, of equal ones the first that does not hold: a series may be there
    once."""
    found: dict[tuple[str, ...], Word] = {}
    for word in sorted(story.words, key=lambda word: word.check.verdict is Verdict.PASS):
        check = word.check
        runtime = check.runtime or MEASUREMENT
        names = (check.part, runtime, check.output, check.name, check.point)
        found.setdefault(tuple(printable(name or "") for name in names), word)
    yield from found.items()


def _seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
