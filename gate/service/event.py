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

_FOR_PEOPLE = (Tag.REVIEW_COMMENT, Tag.REVIEW_RESULT)
"""Tags of ours that change nothing; the second one we set ourselves."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a registered model. `detail`: the tag's key, or the alias."""

    kind: str
    model: str
    """With its workspace, as the settings name it."""
    detail: str | None = None
    hint: str | None = field(default=None, compare=False)
    """For the log alone: what the sender may have done by mistake."""
    is_test: bool = field(default=False, compare=False)
    """Whether it is a test delivery of the server."""


@dataclass(frozen=True)
class Unknown:
    """A well-formed delivery about something that is none of `EVENTS`."""


@dataclass(frozen=True)
class Malformed:
    """No delivery of MLflow."""

    reason: str


def read(body: bytes, tag: ReviewTag) -> Event | Unknown | Malformed:
    """Parse a delivery's body; any bytes give one of the three results.

    `tag`: the tag for reviews.
    """
    try:
        message = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError:
        return Malformed("the body is not UTF-8")
    except (ValueError, RecursionError):
        return Malformed("the body is not JSON")
    if not isinstance(message, dict):
        return Malformed("the body is not a JSON object")
    entity, action, data = message.get("entity"), message.get("action"), message.get("data")
    if not isinstance(entity, str) or not isinstance(action, str):
        return Malformed("entity and action are not both text")
    workspace = message.get("workspace")  # only where they are enabled
    if not isinstance(workspace, str | None):
        return Malformed("workspace is not text")
    kind = f"{entity}.{action}"
    return _event(kind, workspace, data, tag) if kind in EVENTS else Unknown()


def ignored(event: Event, *, aliases: Collection[str], tag: ReviewTag) -> str | None:
    """Return why an event changes nothing for us, or None if the registry must be read again.

    `tag`: by which reviewers speak.
    """
    if event.kind.startswith("model_version_alias.") and event.detail not in aliases:
        return "another alias"
    if event.kind.startswith("model_version_tag.") and not _matters(event.detail or "", tag):
        return "another tag"
    return None


def _event(kind: str, workspace: str | None, data: Any, tag: ReviewTag) -> Event | Malformed:
    if not isinstance(data, dict):
        return Malformed("data is not a JSON object")
    name = data.get("name")
    if not isinstance(name, str) or not name:
        return Malformed("data.name is not a model's name")
    model = str(ModelKey(None if workspace == DEFAULT else workspace, name))
    place = {"model_version_tag": "key", "model_version_alias": "alias"}.get(kind.partition(".")[0])
    is_test = name == EXAMPLE_MODEL
    if place is None:
        return Event(kind, model, is_test=is_test)
    detail = data.get(place)
    if not isinstance(detail, str):
        return Malformed(f"data.{place} is not text")
    value = data.get("value")
    hint = _hint(detail, str(value), tag) if kind == "model_version_tag.set" else None
    return Event(kind, model, detail, hint, is_test)


def _hint(key: str, value: str, tag: ReviewTag) -> str | None:
    correction = reviews.correction({key: value}, tag)
    return correction and f"{key} says nothing: {correction}"


def _matters(key: str, tag: ReviewTag) -> bool:
    """Return whether a tag of this key may change something: the gate's own, and the reviewers'."""
    return (key.startswith(_OUR_TAGS) and key not in _FOR_PEOPLE) or tag.may_reject(key)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
