from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.service.app import (
    DELIVERY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    DeliveryRefused,
    Envelope,
    sign_delivery,
)

SECRET = "a secret with an umlaut: ü"
BODY = '{"entity": "model_version", "data": {"name": "Ω"}}'.encode()
HEADERS = {
    DELIVERY_HEADER: ["6f1c0f3e-1c9f-4a54-8f2f-2c5f7f6c7f10"],
    TIMESTAMP_HEADER: ["1700000000"],
    SIGNATURE_HEADER: [
        sign_delivery(
            SECRET,
            delivery_id="6f1c0f3e-1c9f-4a54-8f2f-2c5f7f6c7f10",
            timestamp="1700000000",
            body=BODY,
        )
    ],
}


def read_headers(headers: dict[str, list[str]], *, now: float = 1700000000) -> Envelope:
    return Envelope.from_headers(lambda name: headers.get(name, []), now=now, window_s=300)


def test_signature_matches_openssl() -> None:
    # printf 'abc.1700000000.{}' | openssl dgst -sha256 -hmac 0123456789abcdef -binary | base64
    assert (
        sign_delivery("0123456789abcdef", delivery_id="abc", timestamp="1700000000", body=b"{}")
        == VECTOR
    )


VECTOR = "v1,TcNOyRQKR5QfSu1UtSwUkII6CA1X+alfBVrlXa0A+h0="


@given(
    secret=st.text(min_size=1).filter(lambda text: text.isprintable()),
    delivery=st.uuids().map(str),
    timestamp=st.integers(0, 10**10).map(str),
    body=st.text(),
)
def test_signature_matches_mlflow(secret: str, delivery: str, timestamp: str, body: str) -> None:
    from mlflow.webhooks.delivery import _generate_hmac_signature

    assert sign_delivery(
        secret, delivery_id=delivery, timestamp=timestamp, body=body.encode()
    ) == _generate_hmac_signature(secret, delivery, timestamp, body)


def test_header_names_match_mlflow() -> None:
    from mlflow.webhooks import constants

    assert SIGNATURE_HEADER == constants.WEBHOOK_SIGNATURE_HEADER
    assert TIMESTAMP_HEADER == constants.WEBHOOK_TIMESTAMP_HEADER
    assert DELIVERY_HEADER == constants.WEBHOOK_DELIVERY_ID_HEADER


@pytest.mark.parametrize(
    ("body", "secrets"),
    [
        (BODY + b" ", [SECRET]),
        (BODY[:-1], [SECRET]),
        (b"", [SECRET]),
        (BODY, ["another"]),
        (BODY, []),
        (BODY, [SECRET + " "]),
    ],
)
def test_wrong_body_or_secret_is_refused(body: bytes, secrets: list[str]) -> None:
    with pytest.raises(DeliveryRefused) as caught:
        read_headers(HEADERS).verify_body(body, secrets=secrets)
    assert caught.value.outcome == "forged"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (SIGNATURE_HEADER, []),
        (SIGNATURE_HEADER, HEADERS[SIGNATURE_HEADER] * 2),
        (SIGNATURE_HEADER, [" ".join(HEADERS[SIGNATURE_HEADER] * 2)]),
        (SIGNATURE_HEADER, ["v1,"]),
        (SIGNATURE_HEADER, [HEADERS[SIGNATURE_HEADER][0].replace("v1,", "v2,")]),
        (SIGNATURE_HEADER, [HEADERS[SIGNATURE_HEADER][0].removeprefix("v1,")]),
        (SIGNATURE_HEADER, [HEADERS[SIGNATURE_HEADER][0] + "\n"]),
        (SIGNATURE_HEADER, ["v1," + "é" * 44]),
        (TIMESTAMP_HEADER, []),
        (TIMESTAMP_HEADER, ["1700000000", "1700000000"]),
        (TIMESTAMP_HEADER, ["-1700000000"]),
        (TIMESTAMP_HEADER, ["1700000000.0"]),
        (TIMESTAMP_HEADER, ["nan"]),
        (TIMESTAMP_HEADER, ["9" * 5000]),
        (TIMESTAMP_HEADER, ["\u0661\u0667" + "\u0660" * 8]),
        (TIMESTAMP_HEADER, ["1_700_000_000"]),
        (DELIVERY_HEADER, []),
        (DELIVERY_HEADER, ["a", "a"]),
        (DELIVERY_HEADER, [""]),
        (DELIVERY_HEADER, ["x" * 129]),
        (DELIVERY_HEADER, ["abc.1700000000"]),
        (DELIVERY_HEADER, ["a\nb"]),
    ],
)
def test_malformed_headers_are_refused(name: str, values: list[str]) -> None:
    with pytest.raises(DeliveryRefused, match=name) as caught:
        read_headers(HEADERS | {name: values})
    assert caught.value.outcome == "unsigned"


@pytest.mark.parametrize(
    ("offset", "fresh"), [(0, True), (300, True), (-300, True), (300.5, False), (-300.5, False), (1e9, False)]
)  # fmt: skip
def test_only_recent_deliveries_are_accepted(offset: float, fresh: bool) -> None:
    if fresh:
        read_headers(HEADERS, now=1700000000 + offset)
        return
    with pytest.raises(DeliveryRefused) as caught:
        read_headers(HEADERS, now=1700000000 + offset)
    assert caught.value.outcome == "stale"


def test_all_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or compare(a, b))
    read_headers(HEADERS).verify_body(BODY, secrets=[SECRET, "second", "third"])
    assert len(compared) == 3
