"""The endpoint never answers 5xx and never acts on a request without a valid signature."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.service.app import DELIVERY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, WEBHOOK_PATH
from tests.service.deliveries import Service, event_body, run_service
from tests.service.deliveries import settings as service_settings

NAMES = ["Content-Type", SIGNATURE_HEADER, TIMESTAMP_HEADER, DELIVERY_HEADER, "Content-Length", "Transfer-Encoding", "X-Other"]  # fmt: skip
VALUES = st.one_of(
    st.binary(max_size=80).map(lambda value: bytes(b for b in value if b not in b"\r\n\0")),
    st.sampled_from([b"application/json", b"v1," + b"A" * 43 + b"=", b"1700000000", b"chunked", b"5"]),
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def fuzzed_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with run_service(service_settings(tmp_path_factory.mktemp("fuzzed"))) as started:
        yield started
        assert started.recorder.causes == []
        assert started.get("/healthz").status_code == 200


@given(raw=st.binary(max_size=4096), sent=st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=8))  # fmt: skip
def test_random_bodies_and_headers_are_refused(
    fuzzed_service: Service, raw: bytes, sent: list[tuple[str, bytes]]
) -> None:
    url = httpx.URL(fuzzed_service.address)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=2)
    connection.putrequest("POST", WEBHOOK_PATH)
    if not any(name in ("Content-Length", "Transfer-Encoding") for name, _value in sent):
        connection.putheader("Content-Length", str(len(raw)))
    for name, value in sent:
        connection._buffer.append(f"{name}: ".encode() + value)  # type: ignore[attr-defined]
    try:
        connection.endheaders(raw)
        assert 400 <= connection.getresponse().status < 500
    except (TimeoutError, ConnectionError, http.client.HTTPException):
        pass  # the server waits for the rest of the body, or closed the connection
    finally:
        connection.close()


@given(
    changes=st.dictionaries(st.sampled_from(["entity", "action", "data", "timestamp"]), JSON),
    data=st.dictionaries(st.sampled_from(["name", "alias", "key", "version"]), JSON),
)
@pytest.mark.proof
def test_signed_event_with_random_fields_is_answered(
    fuzzed_service: Service, changes: Any, data: Any
) -> None:
    event = event_body(model="another", **data) | changes
    response = fuzzed_service.send(event)
    assert response.status_code in (200, 400, 403)
    assert response.json().keys() == {"outcome"}
