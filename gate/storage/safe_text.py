"""Remove passwords and terminal control characters from text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from urllib.parse import unquote

from gate.errors import StorageError

HIDDEN = "[hidden]"
_PARAMETER = re.compile(r"((?:password|passwd|pwd|token|secret)=)([^&\s]+)", re.IGNORECASE)
_SIGNATURE = re.compile(r"v1,[A-Za-z0-9+/]{20,}={0,2}")
_WORD = re.compile(r"\S+")

_MOST_URLS = 8
"""In one word; none that we show has more."""

_SHORTEST = 6
"""Characters of a password that is looked for by itself: a shorter one is in ordinary words."""

_SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "PGPASSWORD")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ADDRESS_VARIABLES = ("GATE_STATE", "GATE_SAME_REGISTRY", "MLFLOW_TRACKING_URI")


def check_name(name: str, *, what: str) -> str:
    """`name`, if it is safe as a file name and in a URL. Raises StorageError."""
    if not _NAME.fullmatch(name):
        raise StorageError(
            f"{make_printable(name)[:120]!r} can't be the name of a {what}: letters, digits, '.', "
            "'_' and '-' are allowed, at most 100, a letter or digit first. Choose another name."
        )
    return name


class Redaction:
    """Takes secrets, signatures and the passwords in URLs out of texts.

    `addresses`: what was given to this process besides its environment; the passwords in them are
    hidden wherever they stand.
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
            self._fixed |= {found for found in passwords(address) if len(found) >= _SHORTEST}

    def clean(self, text: str) -> str:
        """The text without them."""
        for secret in sorted(self._fixed | set(self._secrets()), key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return without_passwords(_SIGNATURE.sub(HIDDEN, text), instead=f"{HIDDEN}@")


EXAMPLE_MODEL = "example_model"
"""What MLflow names in its test deliveries."""


def check_model_name(name: str) -> str:
    """`name`, if every command can work with a registered model of that name. Raises
    StorageError."""
    check_name(name, what="registered model")
    if name == EXAMPLE_MODEL:
        raise StorageError(
            f"'{EXAMPLE_MODEL}' is what MLflow names in its test deliveries. Choose another name."
        )
    return name


def redacted(uri: str) -> str:
    """The URI without user and password, those among its parameters included."""
    return without_parameters(without_credentials(uri, ""))


def without_passwords(text: str, *, instead: str = "") -> str:
    """The text with `instead` for `user:password@` in each URL, and `[hidden]` for parameters."""

    def cleaned(found: re.Match[str]) -> str:
        *before, rest = found[0].split("://")
        if len(before) > _MOST_URLS and "@" in found[0]:
            return HIDDEN
        for scheme in reversed(before):
            rest = without_credentials(f"{scheme}://{rest}", instead)
        return rest

    text = without_parameters(text)
    return _WORD.sub(cleaned, text) if "@" in text else text


def without_parameters(text: str) -> str:
    """The text with `[hidden]` for the value of each `password=` and its like."""
    return _PARAMETER.sub(rf"\g<1>{HIDDEN}", text)


def without_credentials(uri: str, instead: str) -> str:
    """The URI with `instead` in the place of `user:password@`.

    A password may hold `@` and `/`, which it should not: databases read it up to an `@` behind
    the first `/` too. So where there is a password, it ends at the last `@`.
    """
    scheme, mark, rest = uri.partition("://")
    end = _end_of_credentials(scheme, rest)
    return f"{scheme}{mark}{instead}{rest[end:]}" if end else uri


def passwords(uri: str) -> set[str]:
    """The passwords in a URI, as they are written there and as they are meant."""
    scheme, _, rest = uri.partition("://")
    user_and_password = rest[: _end_of_credentials(scheme, rest)].removesuffix("@")
    found = {user_and_password.partition(":")[2], *(m[2] for m in _PARAMETER.finditer(rest))}
    return {text for raw in found if raw for text in (raw, unquote(raw))}


def _end_of_credentials(scheme: str, rest: str) -> int:
    server = rest.partition("/")[0]
    if ":" not in server.partition("@")[0]:  # no password, at most a user or a token
        return server.rfind("@") + 1
    is_port = scheme.endswith(("http", "https")) and server.rpartition(":")[2].isdigit()
    if is_port and "@" not in server:  # what follows is a path
        return 0
    return rest.rfind("@") + 1


def shorten(text: str, limit: int) -> str:
    """Return the text, cut to at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


# Names in a judged file are untrusted: every message passes them through `make_printable`.
def make_printable(text: str) -> str:
    """`text` on one line, without anything that could steer a terminal."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else "�" for char in line)
