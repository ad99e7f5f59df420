"""Errors of MLflow, its HTTP client and its database, told once in the gate's own tree."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from gate.errors import (
    GateError,
    RegistryDenied,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
    StorageError,
)
from gate.package import extras
from gate.storage.redaction import redacted, without_passwords
from gate.storage.sqlite_errors import WAIT, trouble

_STORAGE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission is missing",
    errno.EPERM: "permission is missing",
    errno.EFBIG: "the file is too big for the file system",
}
_STORAGE_WORDS = ("disk is full", "no space left", "readonly database", "read-only file system")
_DENIED_CODES = ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED")
_UNAVAILABLE_CODES = ("TEMPORARILY_UNAVAILABLE", "DEADLINE_EXCEEDED", "REQUEST_LIMIT_EXCEEDED")
_UNREACHED_WORDS = (
    "max retries exceeded", "connection refused", "timed out", "connection aborted",
    # of the drivers of databases
    "timeout expired", "failed to resolve", "could not translate host",
    "server closed the connection", "is starting up", "is shutting down",
    "too many clients", "too many connections",
    "can't connect to", "terminating connection", "connection is lost",
)  # fmt: skip

START = (
    "Start it, or unset MLFLOW_TRACKING_URI to use the local database; "
    "`make ui` serves the local one."
)


@contextmanager
def translated(uri: str, doing: str) -> Iterator[None]:
    """Raise RegistryUnavailable, RegistryDenied, ResourceGone, StorageError or RegistryError.

    Broad on purpose: MLflow lets errors of requests, SQLAlchemy, sqlite3 and the artifact
    store's client through, and which of them depends on the store.
    """
    try:
        yield
    except GateError:
        raise
    except Exception as error:
        missing = extras.missing(error)
        if missing is not None:
            raise missing from error
        if trouble(error) == "locked":
            raise RegistryUnavailable(
                f"cannot {doing} at {redacted(uri)}: the database is locked. {WAIT}"
            ) from error
        raise _translate(error, uri=redacted(uri), doing=doing) from error


def is_gone(error: Exception) -> bool:
    """True if the error says that something is not there (and nothing else went wrong)."""
    if isinstance(error, FileNotFoundError):
        return True
    statuses = set(re.findall(r"\b(\d{3}) (?:Client|Server) Error", str(error)))
    code = getattr(error, "error_code", None)
    return code == "RESOURCE_DOES_NOT_EXIST" or statuses == {"404"}


def _translate(error: Exception, *, uri: str, doing: str) -> GateError:
    # MLflow repeats the address with user and password in its own message.
    text = without_passwords(" ".join(str(error).split()))
    shown = text if len(text) <= 400 else f"{text[:400]} …"
    lowered = text.lower()
    for cause in _chain(error):
        reason = _STORAGE.get(getattr(cause, "errno", None) or 0)
        if isinstance(cause, OSError) and reason:
            where = cause.filename or uri
            return StorageError(f"cannot {doing}: {where}: {reason}. Mend that, then repeat.")
    if any(words in lowered for words in _STORAGE_WORDS):
        return StorageError(f"cannot {doing} at {uri}: {shown}. Free space or fix permissions.")
    code, status = str(getattr(error, "error_code", "")), _status(error, text)
    if code in _DENIED_CODES or status in (401, 403):
        return RegistryDenied(denied(uri, doing))
    if code in _UNAVAILABLE_CODES or status in (429, 502, 503, 504) or _unreached(error, lowered):
        return RegistryUnavailable(f"cannot {doing}: no answer from {uri}: {shown} {START}")
    if code == "RESOURCE_DOES_NOT_EXIST":
        return ResourceGone(
            f"cannot {doing} at {uri}: {shown}. The run or version was deleted, or belongs to "
            "another server: repeat the stage that makes it."
        )
    return RegistryError(f"cannot {doing} at {uri}: {type(error).__name__}: {shown}")


def denied(uri: str, doing: str) -> str:
    """What to do where the server refuses this user."""
    return (
        f"cannot {doing}: {uri} refuses this user. A promotion needs EDIT on the registered model "
        "(and the right to create it the first time): set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD of a user who has it, or have an administrator grant it."
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _status(error: Exception, text: str) -> int | None:
    """The HTTP status: of the response where the error carries one, else as MLflow words it."""
    for cause in _chain(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    worded = re.search(r"failed with error code (\d{3})\b", text)
    return int(worded[1]) if worded else None


def _unreached(error: Exception, lowered: str) -> bool:
    refused = any(isinstance(cause, ConnectionError | TimeoutError) for cause in _chain(error))
    return refused or any(words in lowered for words in _UNREACHED_WORDS)
