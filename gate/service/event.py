"""Strict parsing of deliveries, and the decision whether an event concerns this service.

Only the model's name is used: events are hints, and the registry is read again.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from gate.mlflow_client.webhooks import EVENTS
from gate.policy.sections import ReviewTag
from gate.registry import reviews
from gate.registry.interface import Tag
from gate.storage.safe_text import EXAMPLE_MODEL
from gate.storage.workspace import DEFAULT, ModelKey

_OUR_TAGS = "gate."

_INFORMATIONAL = (Tag.REVIEW_COMMENT, Tag.REVIEW_RESULT)
"""Tags of the gate that require no reconcile."""


@dataclass(frozen=True)
class Event:
    """An event of a registered model. `detail`: the tag's key, or the alias."""

    kind: str
    model: str
    """The model's key, including its workspace."""
    detail: str | None = None
    hint: str | None = field(default=None, compare=False)
    """A possible mistake of the sender, only for the log."""
    is_test: bool = field(default=False, compare=False)
    """Whether it is a test delivery of the server."""


class MalformedEvent(ValueError):
    """The body is not a delivery of MLflow."""


def read(body: bytes, tag: ReviewTag) -> Event | None:
    """Parse the body of a delivery; return None for a valid event that is not in `EVENTS`.

    `tag`: the review tag. Raises MalformedEvent for other bytes.
    """
    try:
        message = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise MalformedEvent("the body is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise MalformedEvent("the body is not JSON") from error
    if not isinstance(message, dict):
        raise MalformedEvent("the body is not a JSON object")
    entity, action = message.get("entity"), message.get("action")
    if not isinstance(entity, str) or not isinstance(action, str):
        raise MalformedEvent("entity and action are not both text")
    workspace = message.get("workspace")  # only if the server has workspaces
    if not isinstance(workspace, str | None):
        raise MalformedEvent("workspace is not text")
    kind = f"{entity}.{action}"
    return _event(kind, workspace, message.get("data"), tag) if kind in EVENTS else None


def ignore_reason(event: Event, *, aliases: Collection[str], tag: ReviewTag) -> str | None:
    """Return why an event is irrelevant, or None if the registry must be read again.

    `tag`: the review tag.
    """
    if event.kind.startswith("model_version_alias.") and event.detail not in aliases:
        return "another alias"
    if event.kind.startswith("model_version_tag."):
        key = event.detail or ""
        is_relevant = key.startswith(_OUR_TAGS) and key not in _INFORMATIONAL
        return None if is_relevant or tag.may_reject(key) else "another tag"
    return None


def _event(kind: str, workspace: str | None, data: Any, tag: ReviewTag) -> Event:
    if not isinstance(data, dict):
        raise MalformedEvent("data is not a JSON object")
    name = data.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedEvent("data.name is not a model's name")
    model = str(ModelKey(None if workspace == DEFAULT else workspace, name))
    key = {"model_version_tag": "key", "model_version_alias": "alias"}.get(kind.partition(".")[0])
    is_test = name == EXAMPLE_MODEL
    if key is None:
        return Event(kind, model, is_test=is_test)
    detail = data.get(key)
    if not isinstance(detail, str):
        raise MalformedEvent(f"data.{key} is not text")
    hint = None
    if kind == "model_version_tag.set":
        correction = reviews.correction({detail: str(data.get("value"))}, tag)
        hint = correction and f"{detail} has no effect: {correction}"
    return Event(kind, model, detail, hint, is_test)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
