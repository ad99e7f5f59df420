"""Settings, validated before anything is opened; webhook secrets."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from gate.errors import ServiceError, StorageError
from gate.ledger.database import DEFAULT, state_url
from gate.policy.policy import Policy
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS
from gate.storage.files import MODE, read_private, replacing
from gate.storage.safe_text import redacted
from gate.storage.workspace import ModelKey

SERVICE_PAUSE_S = 60.0
"""After which a second download of the service may confirm that a version has wrong bytes."""


# A file is read again whenever it changed, so that a rotation needs no restart.
SECRETS_VARIABLE = "GATE_WEBHOOK_SECRETS"
"""The environment variable that is read where no file is named."""


MIN_LENGTH = 16

_log = logging.getLogger(__name__)


class WebhookSecrets:
    """Secrets, newest first, of an environment variable or a file: one in a line."""

    def __init__(self, secrets: Sequence[str], *, file: Path | None = None) -> None:
        self._secrets = tuple(secrets)
        self._file = file
        self._state = _state(file) if file else None
        self._all_secrets = set(secrets)
        self._lock = threading.Lock()

    @classmethod
    def of_file(cls, path: Path) -> WebhookSecrets:
        """Read a file that only its owner may read.

        Raises ServiceError where it is missing, open to others, empty, or a secret is too short.
        """
        return cls(_read(path), file=path)

    @classmethod
    def of_environment(cls, name: str) -> WebhookSecrets:
        """Read an environment variable. Raises ServiceError where it holds no secret."""
        if name not in os.environ:
            raise ServiceError(
                f"there is no secret: neither a secret file nor the environment variable {name}. "
                "Without one the service can't recognize deliveries of MLflow. "
                "Let gate webhooks register --secret-file FILE make one."
            )
        return cls(_parsed(os.environ[name], where=name))

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets in force now. A file that became unusable leaves the last ones in force."""
        if self._file is not None:
            with self._lock:
                self._refresh(self._file)
        return self._secrets

    @property
    def all_secrets(self) -> frozenset[str]:
        """All secrets that were ever in force here: none of them belongs into a log."""
        return frozenset(self._all_secrets)

    def _refresh(self, file: Path) -> None:
        try:
            state = _state(file)
            if state == self._state:
                return
            self._state = state
            secrets = _read(file)
        except ServiceError as error:
            _log.error("the old secrets stay in force: %s", error)
            return
        self._all_secrets |= set(secrets)
        self._secrets = secrets
        _log.info("secrets were read again", extra={"fields": {"secrets": len(secrets)}})


def write(path: Path, secrets: Sequence[str]) -> None:
    """Write a secret file, atomically, readable by its owner only. Raises StorageError.

    A link stays one, and the owner stays the same: the service may be another user than we are.
    """
    path = Path(os.path.realpath(path))
    with replacing(path) as temporary:
        before = path.stat() if path.exists() else None
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(descriptor, MODE)
            if before is not None and before.st_uid != os.fstat(descriptor).st_uid:
                os.fchown(descriptor, before.st_uid, before.st_gid)
            stream.writelines(f"{secret}\n" for secret in secrets)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _read(path: Path) -> tuple[str, ...]:
    missing = "Let gate webhooks register --secret-file FILE make it."
    try:
        text = read_private(path, what="secret file", missing=missing)
    except StorageError as error:
        raise ServiceError(str(error)) from error
    return _parsed(text, where=str(path))


def _parsed(text: str, *, where: str) -> tuple[str, ...]:
    secrets = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not secrets:
        raise ServiceError(f"{where} holds no secret. Write one in a line, the newest first.")
    for number, secret in enumerate(secrets, start=1):
        if len(secret) < MIN_LENGTH:
            raise ServiceError(
                f"secret {number} in {where} has {len(secret)} characters, at least {MIN_LENGTH} "
                "are expected. Make one with: openssl rand -hex 32"
            )
    return secrets


LogFormat = Literal["text", "json"]

Name = Annotated[str, Field(min_length=1, max_length=256)]


class ServiceSettings(BaseModel):
    """How the service runs. Frozen; unknown fields are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    models: tuple[Name, ...] = Field(min_length=1)
    """The registered models that it looks after, in another workspace than `default` as
    `WORKSPACE:NAME`; it does nothing to others."""
    aliases: tuple[Name, ...] = (CANDIDATE, CHAMPION, PREVIOUS)
    """Aliases whose moving is a reason to look."""
    host: str = "127.0.0.1"
    port: int = Field(default=8400, ge=0, le=65_535)
    """0: any free one."""
    tracking_uri: str = Field(min_length=1)
    same_registry: tuple[Name, ...] = ()
    """Other addresses of the registry at `tracking_uri`, under which the ledger has lines: the
    database behind the server, or the server's old name."""
    secret_file: Path | None = None
    """One secret in a line; None: they are in `secret_variable`."""
    secret_variable: str = SECRETS_VARIABLE
    state: str = DEFAULT
    """The database of the ledger."""
    store: Path = Path(".gate/store")
    cors_origins: tuple[Name, ...] = ()
    """Pages of these origins may load deployed models; none: only those of this service."""
    policy: Path | None = None
    """None: the built-in policy."""
    trust: Path | None = None
    """Whose statements count; None: the section `trust:` of the policy's file, if it has one."""
    writers: Path | None = None
    """By which trust its ledger is believed where there is none of these two; None: by none."""
    key: str | None = None
    """By which it signs what it writes into the ledger; None: nothing is signed."""
    body_cap: int = Field(default=1 << 16, ge=1024)
    """Bytes of the largest body that is read, as it must be before its signature is proven."""
    body_timeout_s: float = Field(default=20.0, gt=0)
    """Within which a body must have arrived."""
    window_s: float = Field(default=300.0, gt=0, le=3600)
    """How far a delivery's timestamp may lie from our clock."""
    interval_s: float = Field(default=60.0, gt=0)
    """After which all models are looked at without any event."""
    confirm_s: float = Field(default=SERVICE_PAUSE_S, ge=0)
    """After which a download that was not what it should be is confirmed by a second one."""
    time_limit_s: float | None = Field(default=None, gt=0)
    """Within which a child process must have read or run a file; None: 10 minutes."""
    memory_limit: int | None = Field(default=None, ge=1 << 26)
    """Bytes that it may take; None: 4 GiB, or 80 % of less memory."""
    log_format: LogFormat = "text"
    notify_url: str | None = None
    """To which verdicts, promotions, reverts and reviews are sent; None: nothing is sent."""
    notify_secret_file: Path | None = None
    """By which they are signed: one secret in a line."""

    @model_validator(mode="after")
    def _signs_notifications(self) -> Self:
        if (self.notify_url is None) != (self.notify_secret_file is None):
            raise ValueError(
                "notify_url and notify_secret_file go together (--notify-url, "
                "--notify-secret-file): notifications are signed"
            )
        return self

    @field_validator("models")
    @classmethod
    def _deployable(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(dict.fromkeys(str(ModelKey.parse(model)) for model in models))
        except StorageError as error:
            raise ValueError(str(error)) from error

    @field_validator("notify_url")
    @classmethod
    def _can_be_notified(cls, url: str) -> str:
        # urllib reads no user and password from a URL: each try would fail.
        if not re.fullmatch(r"https?://[^/?#@\s]+([/?#]\S*)?", url):
            raise ValueError("expected https://HOST/PATH, without a user, a password and spaces")
        return url

    @field_validator("state")
    @classmethod
    def _can_be_a_state(cls, text: str) -> str:
        return state_url(text)

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Check what was given; None means the default. Raises ServiceError, a line a field."""
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            lines = []
            for problem in error.errors(include_url=False):
                place = ".".join(str(part) for part in problem["loc"])
                message = problem["msg"].removeprefix("Value error, ")
                if not place:  # the input is all settings, passwords in addresses, too
                    lines.append(message)
                    continue
                value = problem["input"]
                shown = redacted(value) if isinstance(value, str) else value
                lines.append(f"{place}: {message} (seen: {shown!r})")
            raise ServiceError(
                "the service can't run with these settings:\n" + "\n".join(lines)
            ) from error

    @property
    def addresses(self) -> tuple[str, ...]:
        """All that may hold a password."""
        return self.tracking_uri, *self.same_registry, self.state, self.notify_url or ""

    def policy_in_force(self) -> Policy:
        """Return the policy by which the service decides. Raises PolicyError."""
        return Policy.default() if self.policy is None else Policy.from_file(self.policy)

    def keyring(self) -> WebhookSecrets:
        """The secrets. Raises ServiceError where there is none."""
        if self.secret_file is not None:
            return WebhookSecrets.of_file(self.secret_file)
        return WebhookSecrets.of_environment(self.secret_variable)
