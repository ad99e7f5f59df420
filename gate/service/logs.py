"""The service's log: one line an event, as text or JSON, on stderr, without secrets.

Whoever logs may add `extra={"fields": {...}}`: keys of their own in JSON, `key=value` in text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

from gate.service.settings import LogFormat
from gate.storage.redaction import Redaction


class LineFormatter(logging.Formatter):
    """Text or JSON; whatever a stranger sent can't begin a line of its own or steer a terminal."""

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
        fields = {key: _plain(value, clean) for key, value in _fields(record).items()}
        traceback = clean(self.formatException(record.exc_info)) if record.exc_info else None
        if self._json:
            extra = {} if traceback is None else {"traceback": traceback}
            return json.dumps({**fields, **head, "message": message, **extra}, allow_nan=False)
        tail = "".join(f" {key}={value}" for key, value in fields.items())
        line = _printable(f"{at} {head['level']:<7} {head['logger']}: {message}{tail}")
        return line if traceback is None else f"{line}\n{_printable(traceback, keep=chr(10))}"


def set_up(stream: TextIO, *, log_format: LogFormat, redaction: Redaction) -> logging.Handler:
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


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", {})
    return fields if isinstance(fields, dict) else {}


def _plain(value: Any, clean: Callable[[str], str]) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    return clean(str(value))


def _printable(text: str, *, keep: str = "") -> str:
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)
