"""What the service counts, for Prometheus. A registry of its own: two services don't mix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from gate.errors import StateUnavailable

if TYPE_CHECKING:
    from gate.service.inbox import Inbox

_ACCEPTING_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_RECONCILING_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Counters and histograms; the inbox is asked when somebody reads them."""

    def __init__(self, inbox: Inbox) -> None:
        self._registry = registry = CollectorRegistry()
        self.deliveries = Counter(
            "gate_deliveries", "Requests to the webhook by outcome.", ["outcome"], registry=registry
        )
        self.accept_seconds = Histogram(
            "gate_accept_seconds", "From a request's headers to its answer.",
            buckets=_ACCEPTING_S, registry=registry,
        )  # fmt: skip
        self.actions = Counter(
            "gate_actions", "What was done to models.", ["kind", "outcome"], registry=registry
        )
        self.reconcile_seconds = Histogram(
            "gate_reconcile_seconds", "One look at a model and what followed.", ["cause"],
            buckets=_RECONCILING_S, registry=registry,
        )  # fmt: skip
        self.failures = Counter(
            "gate_reconcile_failures", "Looks at a model that failed.", ["error"], registry=registry
        )
        self.registry_seen = Gauge(
            "gate_registry_seen_timestamp_seconds", "When the registry last answered.",
            registry=registry,
        )  # fmt: skip
        registry.register(_InboxCollector(inbox))

    def text(self) -> bytes:
        """All of it in Prometheus's text format. Blocks: asks the inbox."""
        return generate_latest(self._registry)


class _InboxCollector:
    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand, so that registering asks no database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Depth and age, or that they can't be known."""
        try:
            depth, age = self._inbox.depth(), self._inbox.oldest_age()
        except StateUnavailable:
            yield GaugeMetricFamily("gate_inbox_up", "1 if the inbox answers.", value=0)
            return
        yield GaugeMetricFamily("gate_inbox_up", "1 if the inbox answers.", value=1)
        yield GaugeMetricFamily("gate_inbox_depth", "Deliveries that wait.", value=depth)
        yield GaugeMetricFamily(
            "gate_inbox_oldest_seconds", "Age of the oldest delivery that waits.", value=age
        )
