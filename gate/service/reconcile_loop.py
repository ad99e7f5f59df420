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
        metrics: ServiceMetrics,
        interval_s: float = 60.0,
    ) -> None:
        self._reconcile = reconcile
        self._interval_s = interval_s
        self._metrics = metrics
        self._wake_event, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gate-worker", daemon=True)
        self._woken: dict[str, None] = {}
        """Models in the order in which they were woken."""
        self._lock = threading.Lock()
        self._due = dict.fromkeys(models, time.monotonic())
        self._failures = dict.fromkeys(models, 0)
        self._last_contact: float | None = None

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

    def registry_silence_s(self) -> float | None:
        """Seconds since the registry last answered; None if it never did."""
        return None if self._last_contact is None else time.monotonic() - self._last_contact

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake_event.clear()  # before the check: a wake-up during it is not lost
            model, cause = self._next_due()
            if model is None:
                self._wake_event.wait(max(0.01, min(self._due.values()) - time.monotonic()))
                continue
            try:
                retry_reason = self._reconcile_model(model, cause=cause)
            except Exception as error:  # from logging or metrics: no failure ends the loop
                _log.exception("the worker continues after an internal error")
                retry_reason = str(error)
            self._failures[model] = 0 if retry_reason is None else self._failures[model] + 1
            wait = self._interval_s
            if retry_reason is not None:
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

    def _reconcile_model(self, model: str, *, cause: str) -> str | None:
        """Reconcile a model; return the errors that require a retry, or None."""
        fields = {"model": model, "cause": cause}
        start = time.perf_counter()
        results: Sequence[StepResult | Failed]
        try:
            results = self._reconcile(model, cause=cause)
        except Exception as error:
            results = [Failed("look", error)]
        failures = [failure for failure in results if isinstance(failure, Failed)]
        outages = (RegistryUnavailable, RegistryDenied)
        errors = [failure.error for failure in failures]
        if all(isinstance(e, GateError) and not isinstance(e, outages) for e in errors):
            self._last_contact = time.monotonic()
            self._metrics.registry_contact.set_to_current_time()
        for action in results:
            if isinstance(action, StepResult):
                self._metrics.actions.labels(action.kind, action.outcome).inc()
                labels = {"kind": action.kind, "outcome": action.outcome, "to": action.version}
                _log.info("%s", action.reason, extra={"fields": {**fields, **labels}})
        retry_reasons = [self._log_failure(failure, fields) for failure in failures]
        seconds = time.perf_counter() - start
        self._metrics.reconcile_seconds.labels(cause).observe(seconds)
        return "; ".join(filter(None, retry_reasons)) or None

    def _log_failure(self, failed: Failed, fields: dict[str, str]) -> str | None:
        """Log and count a failure; return the reason for a retry, or None if none is needed."""
        error, extra = failed.error, {"fields": {**fields, "kind": failed.kind}}
        if not isinstance(error, GateError):
            self._metrics.failures.labels("unexpected").inc()
            _log.error("a step failed, will retry", exc_info=error, extra=extra)
            return f"unexpected {type(error).__name__}: {error}"
        self._metrics.failures.labels(type(error).__name__).inc()
        if isinstance(error, ResourceGone):
            _log.warning("no retry: %s", error, extra=extra)
            return None
        _log.warning("failed, will retry: %s", error, extra=extra)
        return f"{type(error).__name__}: {error}"


def _backoff(attempts: int) -> float:
    return float(min(_RETRY_CAP_S, 2.0 ** min(attempts - 1, 10)))
