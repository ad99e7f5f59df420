from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.mlflow_client.webhooks import EVENTS
from gate.policy.sections import ReviewTag
from gate.service.event import Event, MalformedEvent, ignore_reason, read
from gate.storage.safe_text import EXAMPLE_MODEL
from tests.service.deliveries import event_body

ALIASES = ("champion",)
TAG = ReviewTag()


def raw(**changes: object) -> bytes:
    return json.dumps(event_body() | changes).encode()


@pytest.mark.parametrize("kind", EVENTS)
def test_mlflow_example_payloads_are_parsed(kind: str) -> None:
    from mlflow.entities.webhook import WebhookEvent
    from mlflow.webhooks.types import get_example_payload_for_event

    payload = get_example_payload_for_event(WebhookEvent.from_str(kind))
    entity, action = kind.split(".")
    result = read(json.dumps({"entity": entity, "action": action, "data": payload}).encode(), TAG)
    assert isinstance(result, Event)
    assert (result.kind, result.model) == (kind, EXAMPLE_MODEL)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe{}",
        '{"entity": "model_version"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"entity": NaN}',
        b"9" * 10_000,
        raw(entity=1),
        raw(action=None),
        raw(data=None),
        raw(data={}),
        raw(data={"name": ""}),
        raw(data={"name": 3, "alias": "champion"}),
        raw(data={"name": "digits"}),
        raw(data={"name": "digits", "alias": ["champion"]}),
    ],
)
def test_malformed_event_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedEvent):
        read(data, TAG)


@pytest.mark.parametrize(
    ("workspace", "model"),
    [(None, "digits"), ("default", "digits"), ("team-a", "team-a:digits"), ("", ":digits")],
)
def test_event_names_the_model_of_its_workspace(workspace: str | None, model: str) -> None:
    result = read(raw(workspace=workspace), TAG)
    assert isinstance(result, Event)
    assert result.model == model


@pytest.mark.parametrize(
    ("entity", "action"), [("prompt", "created"), ("model_version", "exploded"), ("", ""), ("a.b", "c")]
)  # fmt: skip
def test_unknown_event_is_ignored(entity: str, action: str) -> None:
    assert read(raw(entity=entity, action=action, data=None), TAG) is None


@pytest.mark.parametrize(
    ("kind", "key", "value", "is_hinted"),
    [
        ("model_version_tag.set", "gate.review", "approve", True),
        ("model_version_tag.set", "gate.review", "Approved ", False),
        ("model_version_tag.set", "gate.review", None, True),
        ("model_version_tag.set", "gate.review", ["approved"], True),
        ("model_version_tag.set", "gate.review", "approved", False),
        ("model_version_tag.set", "gate.review", "rejected", False),
        ("model_version_tag.set", "gate.other", "approve", False),
        ("model_version_tag.deleted", "gate.review", "approve", False),
    ],
)
def test_invalid_review_value_gets_a_hint(kind, key, value, is_hinted) -> None:
    result = read(json.dumps(event_body(kind, key=key, value=value)).encode(), TAG)
    assert isinstance(result, Event)
    assert result == Event(kind, "digits", key)
    assert (result.hint is not None) == is_hinted
    if result.hint is not None:
        assert "approved or rejected" in result.hint


@given(st.one_of(st.binary(), st.text().map(str.encode), st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["entity", "action", "data", "name"]), inner),
).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_any_body_is_parsed_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedEvent):
        assert isinstance(read(data, TAG), Event | None)


@pytest.mark.parametrize(
    ("event", "matters"),
    [
        (Event("registered_model.created", "m"), True),
        (Event("model_version.created", "m"), True),
        (Event("model_version_alias.created", "m", "champion"), True),
        (Event("model_version_alias.deleted", "m", "champion"), True),
        (Event("model_version_alias.created", "m", "shadow"), False),
        (Event("model_version_tag.set", "m", "gate.review"), True),
        (Event("model_version_tag.deleted", "m", "gate.rolled_back"), True),
        (Event("model_version_tag.set", "m", "team"), False),
    ],
)
def test_only_relevant_events_matter(event: Event, matters: bool) -> None:
    assert (ignore_reason(event, aliases=ALIASES, tag=TAG) is None) == matters


@pytest.mark.parametrize("kind", ["model_version_tag.set", "model_version_tag.deleted"])
@pytest.mark.parametrize(
    ("key", "matters"),
    [
        ("Approval_Check", True),
        ("approval_check", True),
        (" APPROVAL_CHECK ", True),
        ("gate.review", True),
        ("Gate.Review", True),
        ("gate.review_statement.0123456789ab", True),
        ("gate.review_result", False),
        ("gate.review_comment", False),
        ("approval", False),
        ("Approval_Check_2", False),
    ],
)
def test_configured_review_tag_matters(kind: str, key: str, matters: bool) -> None:
    tag = ReviewTag(name="Approval_Check", approved="Approved", rejected="No-Go")
    result = read(json.dumps(event_body(kind, key=key, value="approve")).encode(), tag)
    assert isinstance(result, Event)
    assert (ignore_reason(result, aliases=ALIASES, tag=tag) is None) == matters
    hinted = kind.endswith(".set") and tag.may_reject(key)
    assert (result.hint is not None) == hinted
    if hinted:
        assert result.hint is not None
        assert "write Approved or No-Go" in result.hint
