"""Timer and wake-ups; back-off per model."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from gate.errors import (
    GateError,
    RegistryDenied,
    RegistryUnavailable,
    ResourceGone,
    StateUnavailable,
)
from gate.service.inbox import Claim, Inbox, Memory
from gate.service.monitoring import Failed, Reconcile, ServiceMetrics, StepResult

# Nothing ends it but `stop`: what goes wrong is logged, counted and tried again later.


_POLL_S = 1.0

_RETRY_CAP_S = 60.0

_PURGE_EVERY_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Intervals:
    """What the worker looks after, and how often."""

    models: tuple[str, ...]
    interval_s: float = 60.0
    """After which every model is looked at, whatever was delivered."""
    memory: Memory = field(default_factory=Memory)
    poll_s: float = _POLL_S
    """After which the inbox is looked at for what other processes received or left behind."""


class ReconcileLoop:
    """Looks after models: at once after a delivery (`wake`), and from time to time."""

    def __init__(
        self, inbox: Inbox, reconcile: Reconcile, *, rhythm: Intervals, metrics: ServiceMetrics
    ) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._inbox = inbox
        self._reconcile = reconcile
        self._rhythm = rhythm
        self._metrics = metrics
        self._awake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gate-worker", daemon=True)
        start = time.monotonic()
        self._due = dict.fromkeys(rhythm.models, start)
        self._failures = dict.fromkeys(rhythm.models, 0)
        self._purge_due = start
        self._registry_seen: float | None = None

    def start(self) -> None:
        """Begin. The first thing is a look at every model: nobody knows what was missed."""
        self._thread.start()

    def wake(self) -> None:
        """There is something in the inbox. From any thread."""
        self._awake.set()

    def stop(self, *, timeout_s: float) -> bool:
        """Finish what is under way and take nothing more; False if it did not end in time."""
        self._stopping.set()
        self._awake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """True while it works and was not told to stop."""
        return self._thread.is_alive() and not self._stopping.is_set()

    def registry_silence_s(self) -> float | None:
        """Seconds since the registry last answered; None if it never did."""
        return None if self._registry_seen is None else time.monotonic() - self._registry_seen

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._awake.clear()  # before looking: what comes while we look wakes us again
            done = [self._done(step) for step in (self._deliveries, self._timer, self._purge)]
            if not any(done):
                self._awake.wait(self._pause())

    def _done(self, step: Callable[[], bool]) -> bool:
        """Whether a step had something to do; one that fails does not keep others from theirs."""
        try:
            return not self._stopping.is_set() and step()
        except StateUnavailable as error:
            _log.error("%s", error)
        except Exception:
            _log.exception("the worker goes on after a fault of its own")
            self._metrics.failures.labels("unexpected").inc()
        return False

    def _pause(self) -> float:
        until_timer = min(self._due.values()) - time.monotonic()
        return max(0.01, min(self._rhythm.poll_s, until_timer))

    def _deliveries(self) -> bool:
        claim = self._inbox.claim(self.name, models=self._rhythm.models)
        if claim is None:
            return False
        with self._renewing(claim):
            trouble = self._look(claim.model, cause=_cause(claim))
        if trouble is None:
            self._inbox.done(claim)
        else:
            self._inbox.failed(claim, trouble, retry_at=time.time() + _backoff(claim.attempts))
        return True

    def _timer(self) -> bool:
        model = min(self._due, key=self._due.__getitem__)
        if self._due[model] > time.monotonic():
            return False
        trouble = self._look(model, cause="timer")
        self._failures[model] = 0 if trouble is None else self._failures[model] + 1
        wait = self._rhythm.interval_s
        if trouble is not None:
            wait = min(wait, _backoff(self._failures[model]))
        self._due[model] = time.monotonic() + wait
        return True

    def _look(self, model: str, *, cause: str) -> str | None:
        """Have a model put right; what has to be tried again, and why, or None."""
        fields = {"model": model, "cause": cause}
        start = time.perf_counter()
        done: Sequence[StepResult | Failed]
        try:
            done = self._reconcile(model, cause=cause)
        except Exception as error:
            done = [Failed("look", error)]
        failed = [one for one in done if isinstance(one, Failed)]
        if all(_registry_answered(one.error) for one in failed):
            self._saw_registry()
        for action in done:
            if isinstance(action, StepResult):
                self._metrics.actions.labels(action.kind, action.outcome).inc()
                what = {**fields, "kind": action.kind, "outcome": action.outcome}
                _log.info("%s", action.reason, extra={"fields": {**what, "to": action.version}})
        troubles = [self._trouble(one, fields) for one in failed]
        seconds = time.perf_counter() - start
        self._metrics.reconcile_seconds.labels(cause.partition(" ")[0]).observe(seconds)
        return "; ".join(filter(None, troubles)) or None

    def _trouble(self, failed: Failed, fields: dict[str, str]) -> str | None:
        """Log and count what failed; why it must be tried again. None: it never must be."""
        error, extra = failed.error, {"fields": {**fields, "kind": failed.kind}}
        if not isinstance(error, GateError):
            self._metrics.failures.labels("unexpected").inc()
            _log.error("a step failed, it is tried again", exc_info=error, extra=extra)
            return f"unexpected {type(error).__name__}: {error}"
        self._metrics.failures.labels(type(error).__name__).inc()
        if isinstance(error, ResourceGone):
            _log.warning("written off: %s", error, extra=extra)
            return None
        _log.warning("not done now: %s", error, extra=extra)
        return f"{type(error).__name__}: {error}"

    def _saw_registry(self) -> None:
        self._registry_seen = time.monotonic()
        self._metrics.registry_seen.set_to_current_time()

    def _purge(self) -> bool:
        if time.monotonic() < self._purge_due:
            return False
        self._purge_due = time.monotonic() + _PURGE_EVERY_S
        forgotten = self._inbox.purge(self._rhythm.memory, models=self._rhythm.models)
        if forgotten:
            _log.info("old deliveries were forgotten", extra={"fields": {"number": forgotten}})
            self._purge_due = 0.0  # there may be more; deliveries come in between
        return forgotten > 0

    @contextmanager
    def _renewing(self, claim: Claim) -> Iterator[None]:
        """Keep the lease while a long look goes on."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(self._inbox.lease_s / 3):
                with suppress(StateUnavailable):  # the next one may succeed in time
                    self._inbox.renew(claim)

        thread = threading.Thread(target=renew, name="gate-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _registry_answered(error: Exception) -> bool:
    away = isinstance(error, RegistryUnavailable | RegistryDenied)
    return isinstance(error, GateError) and not away


def _cause(claim: Claim) -> str:
    first, *others = claim.deliveries
    return f"delivery {first}" + (f" and {len(others)} more" if others else "")


def _backoff(attempts: int) -> float:
    return float(min(_RETRY_CAP_S, 2.0 ** min(attempts - 1, 10)))
