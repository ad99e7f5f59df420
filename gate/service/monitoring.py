"""Step results, log lines, Prometheus metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, Protocol, TextIO

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from gate.service.settings import LogFormat
from gate.storage.safe_text import Redaction


# Log calls may add `extra={"fields": {...}}`: separate keys in JSON, `key=value` in text.
class LineFormatter(logging.Formatter):
    """Formats records as text or JSON, without control characters in received text."""

    def __init__(self, log_format: LogFormat, redaction: Redaction) -> None:
        super().__init__()
        self._json = log_format == "json"
        self._redaction = redaction

    def format(self, record: logging.LogRecord) -> str:
        """Return one redacted record."""
        clean = self._redaction.clean
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"at": at, "level": record.levelname.lower(), "logger": record.name}
        message = clean(record.getMessage())
        extra_fields = getattr(record, "fields", {})
        extra_fields = extra_fields if isinstance(extra_fields, dict) else {}
        fields = {key: _plain(value, clean) for key, value in extra_fields.items()}
        traceback = clean(self.formatException(record.exc_info)) if record.exc_info else None
        if self._json:
            extra = {} if traceback is None else {"traceback": traceback}
            return json.dumps({**fields, **head, "message": message, **extra}, allow_nan=False)
        tail = "".join(f" {key}={value}" for key, value in fields.items())
        line = _printable(f"{at} {head['level']:<7} {head['logger']}: {message}{tail}")
        return line if traceback is None else f"{line}\n{_printable(traceback, keep=chr(10))}"


def configure_logging(
    stream: TextIO, *, log_format: LogFormat, redaction: Redaction
) -> logging.Handler:
    """Send all logs of the process, including uvicorn's, to `stream`; return the handler."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(log_format, redaction))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    return handler


def _plain(value: Any, clean: Callable[[str], str]) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    return clean(str(value))


def _printable(text: str, *, keep: str = "") -> str:
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


_RECONCILING_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServiceMetrics:
    """Counters and a histogram."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        self.deliveries = counter(
            "parity_gate_deliveries", "Requests to the webhook by outcome.", ["outcome"]
        )
        self.actions = counter(
            "parity_gate_actions", "What was done to models.", ["kind", "outcome"]
        )
        self.failures = counter(
            "parity_gate_reconcile_failures", "Looks at a model that failed.", ["error"]
        )
        self.reconcile_seconds = Histogram(
            "parity_gate_reconcile_seconds",
            "One look at a model and what followed.",
            ["cause"],
            buckets=_RECONCILING_S,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


Kind = Literal["guard", "hand_in", "review", "deploy", "replay"]


@dataclass(frozen=True)
class StepResult:
    """A completed action. `outcome` is a word for the metrics, such as `promoted`, `reverted`,
    `deployed` or `refused`."""

    kind: Kind
    outcome: str
    version: str | None
    reason: str


@dataclass(frozen=True)
class Failed:
    """A step that failed and is retried later; the other steps were not affected."""

    kind: Kind | Literal["look"]
    """`look`: no step could be started."""
    error: Exception


class Reconcile(Protocol):
    """Brings a registered model and its deployment into the state that its evidence allows.

    `cause`: `webhook`, `timer` or the caller, for the ledger. Idempotent. Raises GateError if no
    step could be started; then retry later.
    """

    def __call__(self, model: str, *, cause: str) -> Sequence[StepResult | Failed]:
        """Reconcile a model."""
        ...
