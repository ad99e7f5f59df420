"""Remove passwords and terminal control characters from text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from urllib.parse import unquote

from gate.errors import StorageError

HIDDEN = "[hidden]"
_PARAMETER = re.compile(r"((?:password|passwd|pwd|token|secret)=)([^&\s]+)", re.IGNORECASE)
_SIGNATURE = re.compile(r"v1,[A-Za-z0-9+/]{20,}={0,2}")
_WORD = re.compile(r"\S+")

_MAX_URLS = 8
"""Maximum number of URLs in one word."""

_MIN_LENGTH = 6
"""Minimum length of a password that is hidden everywhere: a shorter one occurs in other words."""

_SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "PGPASSWORD")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ADDRESS_VARIABLES = ("GATE_STATE", "GATE_SAME_REGISTRY", "MLFLOW_TRACKING_URI")


def check_name(name: str, *, kind: str) -> str:
    """Return `name` if it is safe as a file name and in a URL. Raises StorageError."""
    if not _NAME.fullmatch(name):
        raise StorageError(
            f"{make_printable(name)[:120]!r} can't be the name of a {kind}: letters, digits, '.', "
            "'_' and '-' are allowed, at most 100, a letter or digit first. Choose another name."
        )
    return name


class Redaction:
    """Removes secrets, signatures and passwords in URLs from text.

    addresses: URLs, in addition to those in the environment, whose passwords are hidden everywhere.
    """

    def __init__(
        self,
        secrets: Callable[[], Collection[str]] = tuple,
        *,
        addresses: Iterable[str] = (),
    ) -> None:
        self._secrets = secrets
        self._fixed = {os.environ[name] for name in _SECRET_VARIABLES if os.environ.get(name)}
        for address in (*addresses, *(os.environ.get(name, "") for name in _ADDRESS_VARIABLES)):
            self._fixed |= {each for each in passwords(address) if len(each) >= _MIN_LENGTH}

    def clean(self, text: str) -> str:
        """Return the text with secrets replaced by `[hidden]`."""
        for secret in sorted(self._fixed | set(self._secrets()), key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return without_passwords(_SIGNATURE.sub(HIDDEN, text), replacement=f"{HIDDEN}@")


EXAMPLE_MODEL = "example_model"
"""The model name in MLflow's test deliveries of webhooks."""


def check_model_name(name: str) -> str:
    """Return `name` if it is valid for a registered model. Raises StorageError."""
    check_name(name, kind="registered model")
    if name == EXAMPLE_MODEL:
        raise StorageError(
            f"'{EXAMPLE_MODEL}' is reserved for MLflow's test deliveries. Choose another name."
        )
    return name


def redacted(uri: str) -> str:
    """Return the URI without user and password, also among its parameters."""
    return without_parameters(without_credentials(uri, ""))


def without_passwords(text: str, *, replacement: str = "") -> str:
    """Replace `user:password@` in each URL by `replacement`, secret parameters by `[hidden]`."""

    def cleaned(match: re.Match[str]) -> str:
        *before, rest = match[0].split("://")
        if len(before) > _MAX_URLS and "@" in match[0]:
            return HIDDEN
        for scheme in reversed(before):
            rest = without_credentials(f"{scheme}://{rest}", replacement)
        return rest

    text = without_parameters(text)
    return _WORD.sub(cleaned, text) if "@" in text else text


def without_parameters(text: str) -> str:
    """Replace the value of each `password=` and similar parameters by `[hidden]`."""
    return _PARAMETER.sub(rf"\g<1>{HIDDEN}", text)


def without_credentials(uri: str, replacement: str) -> str:
    """Replace `user:password@` in a URI by `replacement`.

    A password may contain unescaped `@` and `/`, which databases accept. So it ends at the last
    `@`.
    """
    scheme, mark, rest = uri.partition("://")
    end = _end_of_credentials(scheme, rest)
    return f"{scheme}{mark}{replacement}{rest[end:]}" if end else uri


def passwords(uri: str) -> set[str]:
    """Return the passwords in a URI, both as written and percent-decoded."""
    scheme, _, rest = uri.partition("://")
    user_and_password = rest[: _end_of_credentials(scheme, rest)].removesuffix("@")
    raw = {user_and_password.partition(":")[2], *(m[2] for m in _PARAMETER.finditer(rest))}
    return {text for each in raw if each for text in (each, unquote(each))}


def _end_of_credentials(scheme: str, rest: str) -> int:
    server = rest.partition("/")[0]
    if ":" not in server.partition("@")[0]:  # No password, at most a user or a token.
        return server.rfind("@") + 1
    is_port = scheme.endswith(("http", "https")) and server.rpartition(":")[2].isdigit()
    if is_port and "@" not in server:  # The rest is a path.
        return 0
    return rest.rfind("@") + 1


def shorten(text: str, limit: int) -> str:
    """Truncate a text to at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def list_first(items: Sequence[object], *, most: int = 3) -> str:
    """Return the first items and the number of the others: `a, b, c and 2 more`."""
    more = len(items) - most
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {more} more" if more > 0 else shown


def make_printable(text: str) -> str:
    """Return `text` on one line, without control characters. For untrusted names in messages."""
    return replace_controls(" ".join(text.split()))


def replace_controls(text: str, *, keep: str = "") -> str:
    """Return `text` with a mark for each control character, except those in `keep`."""
    return "".join(char if char.isprintable() or char in keep else "�" for char in text)
