"""Settings, validated before anything is opened; webhook secrets."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
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
from gate.storage.files import MODE, read_private, replacing
from gate.storage.safe_text import redacted
from gate.storage.workspace import ModelKey

SECRETS_VARIABLE = "GATE_WEBHOOK_SECRETS"
"""The environment variable that is used without a secret file."""

MIN_LENGTH = 16

_log = logging.getLogger(__name__)


class WebhookSecrets:
    """Secrets of an environment variable or a file, one per line, newest first."""

    def __init__(self, secrets: Sequence[str], *, file: Path | None = None) -> None:
        self._secrets = tuple(secrets)
        self._file = file
        self._state: tuple[int, ...] | None = ()
        """The state of the file before it was last read; empty: read it at the next use."""
        self.all_secrets = frozenset(secrets)
        """The secrets that were ever valid, which logs must redact."""

    @classmethod
    def from_file(cls, path: Path) -> WebhookSecrets:
        """Read a file that only its owner can read.

        Raises ServiceError if it is missing, readable by others, empty, or has a short secret.
        """
        return cls(_read(path), file=path)

    @classmethod
    def from_environment(cls) -> WebhookSecrets:
        """Read GATE_WEBHOOK_SECRETS. Raises ServiceError if it has no valid secret."""
        if SECRETS_VARIABLE not in os.environ:
            raise ServiceError(
                "there is no secret: neither a secret file nor the environment variable "
                f"{SECRETS_VARIABLE}. The service needs one to verify deliveries of MLflow. Create "
                "one: gate webhooks register --secret-file FILE."
            )
        return cls(_parsed(os.environ[SECRETS_VARIABLE], source=SECRETS_VARIABLE))

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets, read again from a changed file so that a rotation needs no restart. If the
        file becomes invalid, the previous ones stay valid."""
        if self._file is not None and (state := _state(self._file)) != self._state:
            self._state = state
            try:
                self._secrets = _read(self._file)
            except ServiceError as error:
                _log.error("the old secrets stay valid: %s", error)
            self.all_secrets |= set(self._secrets)
        return self._secrets


def write_secrets(path: Path, secrets: Sequence[str]) -> None:
    """Write a secret file atomically, readable only by its owner. Raises StorageError.

    Links and the owner are preserved, because the service may run as another user.
    """
    path = Path(os.path.realpath(path))
    with replacing(path) as temporary:
        old_status = path.stat() if path.exists() else None
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(descriptor, MODE)
            if old_status is not None and old_status.st_uid != os.fstat(descriptor).st_uid:
                os.fchown(descriptor, old_status.st_uid, old_status.st_gid)
            stream.writelines(f"{secret}\n" for secret in secrets)


def _state(path: Path) -> tuple[int, ...] | None:
    """Return what changes with the file's content; None for a missing file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read(path: Path) -> tuple[str, ...]:
    missing = "Create it: gate webhooks register --secret-file FILE."
    try:
        text = read_private(path, kind="secret file", missing=missing)
    except StorageError as error:
        raise ServiceError(str(error)) from error
    return _parsed(text, source=str(path))


def _parsed(text: str, *, source: str) -> tuple[str, ...]:
    secrets = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not secrets:
        raise ServiceError(f"{source} has no secret. Write one per line, the newest first.")
    for number, secret in enumerate(secrets, start=1):
        if len(secret) < MIN_LENGTH:
            raise ServiceError(
                f"secret {number} in {source} has {len(secret)} characters, expected at least "
                f"{MIN_LENGTH}. Create one with: openssl rand -hex 32"
            )
    return secrets


LogFormat = Literal["text", "json"]

Name = Annotated[str, Field(min_length=1, max_length=256)]


class ServiceSettings(BaseModel):
    """Settings of the service. Frozen; unknown fields are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    models: tuple[Name, ...] = Field(min_length=1)
    """The managed models; `WORKSPACE:NAME` outside the workspace `default`. Others are ignored."""
    host: str = "127.0.0.1"
    port: int = Field(default=8400, ge=0, le=65_535)
    """0: any free port."""
    tracking_uri: str = Field(min_length=1)
    same_registry: tuple[Name, ...] = ()
    """Other addresses of the registry that occur in the ledger, such as the server's database or
    old name."""
    secret_file: Path | None = None
    """A file with one secret per line; None: use GATE_WEBHOOK_SECRETS."""
    state: Annotated[str, AfterValidator(state_url)] = DEFAULT
    """The database of the ledger."""
    store: Path = Path(".gate/store")
    cors_origins: tuple[Name, ...] = ()
    """Origins whose pages may load deployed models, in addition to the service's."""
    policy: Path | None = None
    """None: the built-in policy."""
    trust: Path | None = None
    """The trust file for statements; None: the section `trust:` of the policy file, if any."""
    writers: Path | None = None
    """The trust file for ledger entries, if there is no other trust; None: no signature needed."""
    key: str | None = None
    """The key that signs ledger entries; None: entries are not signed."""
    body_cap: int = Field(default=1 << 16, ge=1024)
    """Maximum size of a body in bytes; a body is read before its signature is verified."""
    body_timeout_s: float = Field(default=20.0, gt=0)
    """Time limit for receiving a body."""
    window_s: float = Field(default=300.0, gt=0, le=3600)
    """Maximum difference between a delivery's timestamp and the local clock."""
    interval_s: float = Field(default=60.0, gt=0)
    """Interval between reconciles of all models without events."""
    confirm_s: float = Field(default=60.0, ge=0)
    """Delay before a second download can confirm a mismatch."""
    time_limit_s: float | None = Field(default=None, gt=0)
    """Time limit of a child process that reads or runs a file; None: 10 minutes."""
    memory_limit: int | None = Field(default=None, ge=1 << 26)
    """Memory limit of such a process in bytes; None: 4 GiB, or 80 % of less memory."""
    log_format: LogFormat = "text"
    notify_url: str | None = None
    """URL for notifications of verdicts, promotions, reverts and reviews; None: none are sent."""
    notify_secret_file: Path | None = None
    """A file with the secrets that sign the notifications, one per line."""

    @model_validator(mode="after")
    def _check_notify_secret(self) -> Self:
        if (self.notify_url is None) != (self.notify_secret_file is None):
            raise ValueError(
                "notify_url and notify_secret_file go together (--notify-url, "
                "--notify-secret-file): notifications are signed"
            )
        return self

    @field_validator("models")
    @classmethod
    def _normalize_models(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(dict.fromkeys(str(ModelKey.parse(model)) for model in models))
        except StorageError as error:
            raise ValueError(str(error)) from error

    @field_validator("notify_url")
    @classmethod
    def _check_notify_url(cls, url: str) -> str:
        # urllib does not support user and password in a URL, so that each try would fail.
        if not re.fullmatch(r"https?://[^/?#@\s]+([/?#]\S*)?", url):
            raise ValueError("expected https://HOST/PATH, without a user, a password and spaces")
        return url

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Validate settings; None means the default. Raises ServiceError with a line per field."""
        try:
            return cls(**{name: value for name, value in options.items() if value is not None})
        except ValidationError as error:
            lines = []
            for problem in error.errors(include_url=False):
                name = ".".join(str(part) for part in problem["loc"])
                message = problem["msg"].removeprefix("Value error, ")
                if not name:  # the input is all settings, which may include passwords
                    lines.append(message)
                    continue
                if problem["type"] == "missing":
                    option = name.removesuffix("s").replace("_", "-")
                    lines.append(f"{name}: not set. Pass --{option}")
                    continue
                value = problem["input"]
                shown = redacted(value) if isinstance(value, str) else value
                lines.append(f"{name}: {message} (seen: {shown!r})")
            raise ServiceError(
                "the service can't run with these settings:\n" + "\n".join(lines)
            ) from error

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses that may contain a password."""
        return self.tracking_uri, *self.same_registry, self.state, self.notify_url or ""

    def policy_in_force(self) -> Policy:
        """Return the policy by which the service decides. Raises PolicyError."""
        return Policy.default() if self.policy is None else Policy.from_file(self.policy)

    def keyring(self) -> WebhookSecrets:
        """Return the secrets. Raises ServiceError if there is none."""
        if self.secret_file is not None:
            return WebhookSecrets.from_file(self.secret_file)
        return WebhookSecrets.from_environment()
