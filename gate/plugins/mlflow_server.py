"""MLflow server plug-in: refuse to move `champion` around the ledger.

`mlflow server --app-name parity-gate`, or `parity-gate-basic-auth` with MLflow's users. Settings
come from the environment: GATE_REGISTRY, GATE_STATE, GATE_TRUST (docs/prevention.md).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from flask import Response, request
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2 as codes
from mlflow.protos import model_registry_pb2 as messages
from mlflow.server import app as _mlflow_app
from mlflow.server import handlers
from mlflow.utils.workspace_context import get_request_workspace

from gate.errors import GateError, ServiceError
from gate.ledger.database import DEFAULT, state_url
from gate.ledger.entry import plain
from gate.ledger.history import HistoryCache, ModelHistory
from gate.ledger.ledger import Ledger, verify_writer
from gate.ledger.maintenance import registry_identities
from gate.registry.interface import CHAMPION
from gate.signing.local_keys import LocalKeys
from gate.storage.safe_text import make_printable, redacted
from gate.storage.workspace import check_workspace, in_workspace

# This guard hashes no file, because a request must not wait for a download. The service also
# reverts changes that reach the database in another way, and detects overwritten files.

_log = logging.getLogger(__name__)

_ROUTE = re.compile(r"/mlflow/((?:registered-models|model-versions)/[a-z0-9/-]+)$")

_WORKSPACE_ROUTE = re.compile(r"/mlflow/workspaces/<workspace_name>$")

_LATIN = re.compile(r"LATIN SMALL LETTER (?:VOLAPUK )?(\w)E?(?: WITH |$)")

_IGNORED = "\u0640\u07fa\u0824\u0828\u1cf2\u1cf3\ufe73"
"""Letters that Unicode's collation ignores."""

_HARMLESS = frozenset(
    {
        "registered-models/create",
        "registered-models/update",
        "registered-models/get-latest-versions",
        "model-versions/create",
        "model-versions/update",
        "model-versions/set-tag",
        "model-versions/delete-tag",
    }
)
"""Routes that write, but move no alias and remove nothing. A route that is neither here nor in
`_CHECKS` is refused: a newer MLflow added it."""

_PROMPT_TAG = "mlflow.prompt.is_prompt"
"""MLflow keeps prompts as registered models with this tag."""

_PROMPT_SOURCES = ("dummy-source", "prompt-template")
"""Sources of the versions of prompts."""


class _Target(NamedTuple):
    """The registered model that a request is about."""

    name: str
    workspace: str | None
    aliases: Mapping[str, str]
    is_prompt: bool
    history: ModelHistory

    @property
    def serving(self) -> str | None:
        """The version that the ledger names as the champion."""
        return self.history.serving

    def permits(self, version: str | None) -> bool:
        """Return whether the ledger permits `champion` to be this version; None: no version.

        It does if the last alias move, finished or pending, set this version, or if the last entry
        is an override for it.
        """
        last = self.history.entries[-1] if self.history.entries else None
        if last is not None and last.action == "overridden" and version == last.version:
            return True
        return self.history.change is not None and version == self.serving


class AliasGuard:
    """The rules, for the requests of one server."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._histories = HistoryCache()
        self._ledger: Ledger | None = None

    def check(self) -> Response | None:
        """Return the refusal of the current request; None if the request is allowed.

        403 with the reason, or 503 if the ledger can't be read.
        """
        if request.method in ("GET", "HEAD", "OPTIONS") or request.url_rule is None:
            return None
        route = _ROUTE.search(request.url_rule.rule)
        is_route = route is not None and route[1] not in _HARMLESS
        deletes = request.method == "DELETE" and _WORKSPACE_ROUTE.search(request.url_rule.rule)
        if not is_route and not deletes:
            return None

        def check() -> None:
            if route is not None and is_route:
                self._check(f"{request.method} {route[1]}")
            else:
                self.remove_workspace()

        refuse: Callable[[], Response | None] = handlers.catch_mlflow_exception(check)
        return refuse()

    def _check(self, route: str) -> None:
        if route not in _CHECKS:
            raise MlflowException(
                f"parity-gate does not know the route {route} of this MLflow, so it is refused. "
                "Update parity-gate.",
                error_code=codes.PERMISSION_DENIED,
            )
        message, check = _CHECKS[route]
        # Parsed as by MLflow's handler, so that both get the same values.
        check(self, handlers._get_request_message(message()))

    def target(self, name: str) -> _Target | None:
        """Return the model with its history in the ledger; None if MLflow has no such model, which
        its handler reports. Raises MlflowException if the ledger can't be read."""
        try:
            model = handlers._get_model_registry_store().get_registered_model(name)
        except MlflowException as error:
            if error.error_code == codes.ErrorCode.Name(codes.RESOURCE_DOES_NOT_EXIST):
                return None
            raise
        with _ledger_errors(f"'{CHAMPION}' of {make_printable(name)}"):
            workspace = check_workspace(get_request_workspace() or "default")
            # Databases that ignore case find a model by another spelling: use the stored name.
            history = self.history(model.name, workspace)
        aliases = {alias.casefold(): str(number) for alias, number in model.aliases.items()}
        tagged = str(model._tags.get(_PROMPT_TAG, "")).lower() == "true"
        is_prompt = tagged and not history.entries
        return _Target(model.name, workspace, aliases, is_prompt, history)

    def history(self, name: str, workspace: str | None) -> ModelHistory:
        """Return the ledger history of a model. Raises GateError."""
        with self._lock:
            ledger, names = self._open(workspace)
            return self._histories.history(ledger.entries(), name, registries=names)

    def histories(self, workspace: str | None) -> dict[str, ModelHistory]:
        """Return the ledger history of each model of a workspace. Raises GateError."""
        with self._lock:
            ledger, names = self._open(workspace)
            entries = ledger.entries()
            models = {entry.model for entry in entries if plain(entry.registry) in names}
            return {
                name: self._histories.history(entries, name, registries=names) for name in models
            }

    def _open(self, workspace: str | None) -> tuple[Ledger, frozenset[str]]:
        """Return the ledger, and the names of this server's registry in it."""
        address = self._environment.get("GATE_REGISTRY", "")
        if not urlsplit(address).scheme:
            raise ServiceError(
                f"the server's environment variable GATE_REGISTRY is {address!r}; expected this "
                "server's address as the gate's users name it, such as http://mlflow:5000."
            )
        text, trust = self._environment.get("GATE_STATE"), self._environment.get("GATE_TRUST")
        ledger = self._ledger
        if ledger is None:
            try:
                ledger = Ledger(state_url(text or DEFAULT))
            except ValueError as error:
                raise ServiceError(f"GATE_STATE: {error}") from error
        if not ledger.state.exists:
            raise ServiceError(
                f"there is no ledger at {ledger.location}. Set GATE_STATE of this server to the "
                "database that gate promote writes (--state)."
            )
        if self._ledger is None or trust:  # the file may have other keys by now
            keys = LocalKeys(Path(".gate"), _log.warning)
            self._ledger = verify_writer(ledger, keys, Path(trust) if trust else None)
        return ledger, registry_identities(ledger, in_workspace(address, workspace))

    def refuse(self, target: _Target, action: str, *, remedy: str) -> None:
        """Raise the exception that MLflow turns into a response with status 403."""
        serving = target.serving
        names = f"names version {serving}" if serving else "names no version"
        address = self._environment.get("GATE_REGISTRY", "").rstrip("/")
        page = f"{address}/#/models/{quote(target.name, safe='')}"
        page += f"/versions/{serving}" if serving else ""
        page += f"?workspace={target.workspace}" if target.workspace else ""
        raise MlflowException(
            f"parity-gate refuses to {action}: the ledger {names} as '{CHAMPION}' of "
            f"{make_printable(target.name)}. {remedy} Verdict: {redacted(page)}",
            error_code=codes.PERMISSION_DENIED,
        )

    def set_alias(self, message: Any) -> None:
        """Refuse `champion` for another version than the ledger's."""
        if not _is_champion(message.alias) or not (target := self.target(message.name)):
            return
        number = _number(message.version)
        if target.is_prompt and _has_no_file(target.name, number):
            return
        if not target.permits(number):
            shown = make_printable(number)
            self.refuse(
                target,
                f"point '{CHAMPION}' at version {shown}",
                remedy=f"Use gate promote, gate rollback, or: {_override(target, shown)}.",
            )

    def delete_alias(self, message: Any) -> None:
        """Refuse to delete `champion` while the ledger names a version."""
        if not _is_champion(message.alias) or not (target := self.target(message.name)):
            return
        if not target.is_prompt and "champion" in target.aliases and not target.permits(None):
            self.refuse(target, f"delete '{CHAMPION}'", remedy=f"Use {_override(target)}.")

    def remove_model(self, message: Any) -> None:
        """Refuse to delete or rename a model with a serving version."""
        target = self.target(message.name)
        if target is None or target.is_prompt:
            return
        serves = target.serving is not None or CHAMPION in target.aliases
        if serves and not target.permits(None):
            self.refuse(
                target,
                "delete or rename a model in service",
                remedy=f"Take it out of service first: {_override(target)}.",
            )

    def remove_workspace(self) -> None:
        """Refuse to delete a workspace with a model in service. In all modes but RESTRICT, which
        requires an empty workspace, MLflow deletes its models or moves them into `default`."""
        if request.args.get("mode", "RESTRICT") == "RESTRICT":
            return
        name = str((request.view_args or {}).get("workspace_name"))
        with _ledger_errors(f"the workspace {make_printable(name)}"):
            workspace = check_workspace(name)
            histories = self.histories(workspace)
        for model, history in sorted(histories.items()):
            target = _Target(model, workspace, {}, is_prompt=False, history=history)
            if target.serving is not None and not target.permits(None):
                self.refuse(
                    target,
                    "delete the workspace of a model in service",
                    remedy=f"Take it out of service first: {_override(target)}.",
                )

    def delete_version(self, message: Any) -> None:
        """Refuse to delete the version that serves: MLflow would remove its aliases, too."""
        target = self.target(message.name)
        if target is None or target.is_prompt or target.permits(None):
            return
        if _number(message.version) in (target.serving, target.aliases.get(CHAMPION)):
            self.refuse(
                target,
                "delete the version in service",
                remedy=f"Promote another version first, or: {_override(target)}.",
            )

    def change_stage(self, message: Any) -> None:
        """Refuse the stage Production for another version than the ledger's."""
        if message.stage.strip().casefold() != "production":
            return
        target = self.target(message.name)
        if target is not None and not target.permits(_number(message.version)):
            self.refuse(target, "set the stage Production", remedy="Use gate promote.")

    def change_tag(self, message: Any) -> None:
        """Refuse to make a model a prompt, or a prompt a model, while it has `champion`."""
        if message.key != _PROMPT_TAG:
            return
        target = self.target(message.name)
        if target is not None and CHAMPION in target.aliases:
            self.refuse(target, f"change the tag {_PROMPT_TAG}", remedy="Make another model.")


_CHECKS: dict[str, tuple[Callable[[], Any], Callable[[AliasGuard, Any], None]]] = {
    "POST registered-models/alias": (messages.SetRegisteredModelAlias, AliasGuard.set_alias),
    "DELETE registered-models/alias": (
        messages.DeleteRegisteredModelAlias,
        AliasGuard.delete_alias,
    ),
    "DELETE registered-models/delete": (messages.DeleteRegisteredModel, AliasGuard.remove_model),
    "POST registered-models/rename": (messages.RenameRegisteredModel, AliasGuard.remove_model),
    "DELETE model-versions/delete": (messages.DeleteModelVersion, AliasGuard.delete_version),
    "POST model-versions/transition-stage": (
        messages.TransitionModelVersionStage,
        AliasGuard.change_stage,
    ),
    "POST registered-models/set-tag": (messages.SetRegisteredModelTag, AliasGuard.change_tag),
    "DELETE registered-models/delete-tag": (
        messages.DeleteRegisteredModelTag,
        AliasGuard.change_tag,
    ),
}
"""Request message and check of each route."""


@contextmanager
def _ledger_errors(label: str) -> Iterator[None]:
    """Have MLflow answer with status 503 if the ledger can't be read. `label`: is not changed."""
    try:
        yield
    except GateError as error:
        raise MlflowException(
            f"{label} can't be changed now, because the ledger can't be read: "
            f"{redacted(str(error))}",
            error_code=codes.TEMPORARILY_UNAVAILABLE,
        ) from error


def _is_champion(alias: str) -> bool:
    """Return whether a database might take the alias for `champion`: some ignore case, accents and
    width, as MySQL's default collation does."""
    letters = unicodedata.normalize("NFKD", alias).casefold()
    return "".join(map(_base_letter, letters)) == CHAMPION


def _base_letter(letter: str) -> str:
    """Return the letter without its marks, `o` for `ø`; nothing for a mark or a space."""
    if unicodedata.combining(letter) or letter.isspace() or letter in _IGNORED:
        return ""
    latin = _LATIN.match(unicodedata.name(letter, ""))
    return latin[1].lower() if latin else letter


def _has_no_file(model: str, version: str) -> bool:
    """Return whether a version is a prompt: a model with the tag of prompts may also have files."""
    store = handlers._get_model_registry_store()
    return store.get_model_version(model, version).source in _PROMPT_SOURCES


def _number(version: str) -> str:
    """Return a version as MLflow's stores read it: `01` is `1`."""
    try:
        return str(int(version))
    except ValueError:
        return version


def _override(target: _Target, number: str = "none") -> str:
    key = f"{target.workspace}:{target.name}" if target.workspace else target.name
    return f"gate override {make_printable(key)} --champion {number} --reason WHY"


def create_app() -> Any:
    """Return MLflow's app with the guard: FastAPI under uvicorn, Flask under other servers."""
    _guard()
    if os.environ.get("_MLFLOW_SGI_NAME") == "uvicorn":
        from mlflow.server.fastapi_app import create_fastapi_app

        return create_fastapi_app(_mlflow_app)
    return _mlflow_app


def create_app_with_basic_auth() -> Any:
    """Return MLflow's app with its basic auth, which creates the administrator, and the guard. The
    guard also applies to administrators."""
    from mlflow.server import auth

    app = auth.create_app(_mlflow_app)
    _guard()  # after the check of auth, which refuses users who are not logged in
    return app


def _guard() -> None:
    guard = AliasGuard(dict(os.environ))
    _mlflow_app.before_request(guard.check)
    try:
        guard.history("parity-gate", None)
    except GateError as error:
        # The server starts, but changes of `champion` are refused with 503 until this is fixed.
        _log.error("parity-gate can't read the ledger: %s", redacted(str(error)))
