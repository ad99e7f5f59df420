"""Reconcile models on a timer and on wake-ups, with back-off per model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from gate.errors import GateError, RegistryDenied, RegistryUnavailable, ResourceGone
from gate.service.monitoring import Failed, Reconcile, ServiceMetrics, StepResult

# Level-triggered: each reconcile reads the whole state of a model. If a wake-up is lost in a crash,
# the timer reconciles the model one interval later.
_RETRY_CAP_S = 60.0

_SILENT_INTERVALS = 3
"""Number of intervals without a finished reconcile after which the loop counts as silent."""

_log = logging.getLogger(__name__)


class ReconcileLoop:
    """Reconciles models in one thread, immediately after `wake` and after each interval.

    Failures are logged, counted and retried; only `stop` ends the loop.
    """

    def __init__(
        self,
        reconcile: Reconcile,
        *,
        models: Sequence[str],
        interval_s: float = 60.0,
    ) -> None:
        self._reconcile = reconcile
        self._interval_s = interval_s
        self.metrics = ServiceMetrics()
        self._wake_event, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gate-worker", daemon=True)
        self._woken: dict[str, None] = {}
        """Models in the order in which they were woken."""
        self._lock = threading.Lock()
        self._due = dict.fromkeys(models, time.monotonic())
        self._failures = dict.fromkeys(models, 0)
        self._finished: float | None = None
        """When a model was reconciled last, without an outage of the registry."""

    def start(self) -> None:
        """Start the thread, which first reconciles every model: events may have been missed."""
        self._thread.start()

    def wake(self, model: str) -> None:
        """Request a reconcile of a model. Can be called from any thread; never blocks."""
        with self._lock:
            if model in self._due:
                self._woken[model] = None
        self._wake_event.set()

    def stop(self, *, timeout_s: float) -> bool:
        """Finish the running reconcile and stop; return False if it did not end in time."""
        self._stopping.set()
        self._wake_event.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and was not stopped."""
        return self._thread.is_alive() and not self._stopping.is_set()

    def problem(self) -> str | None:
        """Return why the loop does not bring the models into their states, or None."""
        if not self.alive:
            return "is not running"
        if self._finished is None:
            return "has not reconciled a model yet"
        silence = time.monotonic() - self._finished
        if silence > _SILENT_INTERVALS * self._interval_s:
            return f"has not reconciled a model for {silence:.0f} s"
        return None

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake_event.clear()  # before the check: a wake-up during it is not lost
            model, cause = self._next_due()
            if model is None:
                self._wake_event.wait(max(0.01, min(self._due.values()) - time.monotonic()))
                continue
            try:
                needs_retry = self._reconcile_model(model, cause=cause)
            except Exception:  # from logging or metrics: no failure ends the loop
                _log.exception("the worker continues after an internal error")
                needs_retry = True
            self._failures[model] = self._failures[model] + 1 if needs_retry else 0
            wait = self._interval_s
            if needs_retry:
                wait = min(wait, _backoff(self._failures[model]))
            self._due[model] = time.monotonic() + wait

    def _next_due(self) -> tuple[str | None, str]:
        """Return the next model and the cause.

        Models that are due take precedence over woken ones, so that many events about one model do
        not delay the others.
        """
        model = min(self._due, key=self._due.__getitem__)
        with self._lock:
            if self._due[model] <= time.monotonic():
                self._woken.pop(model, None)
                return model, "timer"
            for model in self._woken:
                del self._woken[model]
                return model, "webhook"
        return None, ""

    def _reconcile_model(self, model: str, *, cause: str) -> bool:
        """Reconcile a model; return whether a retry is required."""
        fields = {"model": model, "cause": cause}
        results: Sequence[StepResult | Failed]
        with self.metrics.reconcile_seconds.labels(cause).time():
            try:
                results = self._reconcile(model, cause=cause)
            except Exception as error:
                results = [Failed("look", error)]
        errors = [result.error for result in results if isinstance(result, Failed)]
        outages = (RegistryUnavailable, RegistryDenied)
        if all(isinstance(e, GateError) and not isinstance(e, outages) for e in errors):
            self._finished = time.monotonic()
        needs_retry = False
        for result in results:
            if isinstance(result, Failed):
                needs_retry |= self._log_failure(result, fields | {"kind": result.kind})
                continue
            self.metrics.actions.labels(result.kind, result.outcome).inc()
            labels = {"kind": result.kind, "outcome": result.outcome, "to": result.version}
            _log.info("%s", result.reason, extra={"fields": fields | labels})
        return needs_retry

    def _log_failure(self, failed: Failed, fields: dict[str, str]) -> bool:
        """Log and count a failure; return whether it requires a retry."""
        error, extra = failed.error, {"fields": fields}
        if not isinstance(error, GateError):
            self.metrics.failures.labels("unexpected").inc()
            _log.error("a step failed, will retry", exc_info=error, extra=extra)
            return True
        self.metrics.failures.labels(type(error).__name__).inc()
        if isinstance(error, ResourceGone):
            _log.warning("no retry: %s", error, extra=extra)
            return False
        _log.warning("failed, will retry: %s", error, extra=extra)
        return True


def _backoff(attempts: int) -> float:
    return float(min(_RETRY_CAP_S, 2.0 ** min(attempts - 1, 10)))
