"""Step results, log lines, Prometheus metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Protocol, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gate.service.settings import LogFormat
from gate.storage.safe_text import Redaction


# Log calls may add `extra={"fields": {...}}`: keys of their own in JSON, `key=value` in text.
class LineFormatter(logging.Formatter):
    """Text or JSON; received text can't start a line of its own or control a terminal."""

    def __init__(self, log_format: LogFormat, redaction: Redaction) -> None:
        super().__init__()
        self._json = log_format == "json"
        self._redaction = redaction

    def format(self, record: logging.LogRecord) -> str:
        """One record, redacted."""
        clean = self._redaction.clean
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"at": at, "level": record.levelname.lower(), "logger": record.name}
        message = clean(record.getMessage())
        given = getattr(record, "fields", {})
        given = given if isinstance(given, dict) else {}
        fields = {key: _plain(value, clean) for key, value in given.items()}
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
    """Send all logs of the process to `stream`, uvicorn's own too; gives the handler."""
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


_ACCEPTING_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_RECONCILING_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServiceMetrics:
    """Counters and histograms."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.deliveries = Counter(
            "parity_gate_deliveries",
            "Requests to the webhook by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.accept_seconds = Histogram(
            "parity_gate_accept_seconds", "From a request's headers to its answer.",
            buckets=_ACCEPTING_S, registry=registry,
        )  # fmt: skip
        self.actions = Counter(
            "parity_gate_actions",
            "What was done to models.",
            ["kind", "outcome"],
            registry=registry,
        )
        self.reconcile_seconds = Histogram(
            "parity_gate_reconcile_seconds", "One look at a model and what followed.", ["cause"],
            buckets=_RECONCILING_S, registry=registry,
        )  # fmt: skip
        self.failures = Counter(
            "parity_gate_reconcile_failures",
            "Looks at a model that failed.",
            ["error"],
            registry=registry,
        )
        self.registry_seen = Gauge(
            "parity_gate_registry_seen_timestamp_seconds", "When the registry last answered.",
            registry=registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)


Kind = Literal["guard", "hand_in", "review", "deploy", "replay"]


@dataclass(frozen=True)
class StepResult:
    """Something that was done. `outcome` is a short word for the metrics: `promoted`, `reverted`,
    `deployed`, `refused`, ..."""

    kind: Kind
    outcome: str
    version: str | None
    reason: str


@dataclass(frozen=True)
class Failed:
    """A step that could not be done now: try again later. It kept no other from its work."""

    kind: Kind | Literal["look"]
    """`look`: no step could be started."""
    error: Exception


class Reconcile(Protocol):
    """Reconciles a registered model and its deployment with the state that its evidence allows.

    The model is read again each time. Idempotent; concurrent calls for one model wait for each
    other.
    """

    def __call__(self, model: str, *, cause: str) -> Sequence[StepResult | Failed]:
        """`cause`: for the ledger: `webhook`, `timer`, or who called.

        Raises GateError where no step could be begun now: try again later.
        """
        ...
