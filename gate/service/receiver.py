"""`POST /webhooks/mlflow`: what MLflow sends is proven, read and kept; others act on it.

MLflow sends a delivery again on 429 and 5xx only, three times within seconds. So passing trouble
is 503, what will never be right is 4xx, and what is right but none of our business is 2xx. Events
of models that are not allow-listed are 403: MLflow does not repeat them and shows them nowhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from gate.errors import StateUnavailable
from gate.service import event as events
from gate.service.event import EXAMPLE_MODEL, Event, Malformed
from gate.service.inbox import Delivery, Inbox
from gate.service.intake import Intake
from gate.service.keyring import Keyring
from gate.service.metrics import Metrics
from gate.service.settings import Settings
from gate.service.signature import Envelope, SignatureRefusal, open_envelope, refuse

_RETRY_AFTER_S = 5
"""MLflow waits so long before it tries again: three times, so we may be away for 15 s."""
_NO_BODY = "has no body that can be read"
_log = logging.getLogger(__name__)


class Answer:
    """What the sender gets: a word and a status, never a reason that helps to forge."""

    def __init__(self, outcome: str, status: int, reason: str = "", **fields: object) -> None:
        self.outcome, self.status, self.reason, self.fields = outcome, status, reason, fields

    def response(self) -> Response:
        """As JSON. After a refusal the connection is closed: its body may not have been read."""
        headers = {"Cache-Control": "no-store"}
        if self.status >= 400:
            headers["Connection"] = "close"
        if self.status == 503:
            headers["Retry-After"] = str(_RETRY_AFTER_S)
        return JSONResponse({"outcome": self.outcome}, self.status, headers)


class Receiver:
    """The endpoint. `received` is called when something new is in the inbox."""

    def __init__(
        self,
        settings: Settings,
        *,
        keyring: Keyring,
        inbox: Inbox,
        metrics: Metrics,
        received: Callable[[], None],
    ) -> None:
        """Raises PolicyError where the policy, which names the reviewers' tag, can't be read."""
        self._settings = settings
        self._tag = settings.policy_in_force().review_tag
        self._keyring = keyring
        self._intake = Intake(inbox)
        self._metrics = metrics
        self._received = received

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        start = time.perf_counter()
        answer = await self._answer(request)
        self._metrics.deliveries.labels(answer.outcome).inc()
        self._metrics.accept_seconds.observe(time.perf_counter() - start)
        level = logging.INFO if answer.status < 400 else logging.WARNING
        fields = {"outcome": answer.outcome, "status": answer.status, **answer.fields}
        _log.log(level, "delivery %s", answer.reason or "taken", extra={"fields": fields})
        return answer.response()

    async def _answer(self, request: Request) -> Answer:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return Answer("wrong_type", 415, "is not application/json")
        envelope = open_envelope(
            request.headers.getlist, now=time.time(), window_s=self._settings.window_s
        )
        if isinstance(envelope, SignatureRefusal):
            return _refused(envelope)
        body = await _read_body(request, self._settings)
        if isinstance(body, Answer):
            return body
        refusal = refuse(envelope, body, secrets=self._keyring.secrets)
        if refusal is not None:
            return _refused(refusal)
        return await self._judge(envelope, body)

    async def _judge(self, envelope: Envelope, body: bytes) -> Answer:
        """What to do with a delivery that is proven to be MLflow's."""
        event, delivery = events.read(body, self._tag), envelope.delivery_id
        if isinstance(event, Malformed):
            return Answer("malformed", 400, f"is malformed: {event.reason}", delivery=delivery)
        if not isinstance(event, Event):
            return Answer("ignored", 200, "is about nothing of ours", delivery=delivery)
        fields = {"delivery": delivery, "event": event.kind, "model": event.model[:256]}
        if event.model == EXAMPLE_MODEL:
            return Answer("test", 200, "is a test of the server's", **fields)
        if event.model not in self._settings.models:
            return Answer("foreign", 403, "is about a model that is not allow-listed", **fields)
        if event.hint is not None:
            _log.warning("%s", event.hint, extra={"fields": fields})
        why = events.ignored(event, aliases=self._settings.aliases, tag=self._tag)
        if why is not None:
            return Answer("ignored", 200, f"changes nothing: {why}", **fields)
        row = Delivery(delivery, event.model, event.kind, hashlib.sha256(body).hexdigest())
        return await self._keep(row, fields)

    async def _keep(self, row: Delivery, fields: dict[str, str]) -> Answer:
        try:
            state = await self._intake.receive(row)
        except StateUnavailable as error:
            return Answer("unavailable", 503, f"could not be kept: {error}", **fields)
        if state == "seen":
            return Answer("seen", 200, "was here before", **fields)
        self._received()
        return Answer("accepted", 202, "is kept", **fields)


def _refused(refusal: SignatureRefusal) -> Answer:
    return Answer(refusal.outcome, refusal.status, f"is refused: {refusal.reason}")


async def _read_body(request: Request, settings: Settings) -> bytes | Answer:
    """The body, or what the sender gets instead. Never holds more than `body_cap` bytes and one
    chunk of the server's."""
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    if declared.isdecimal() and int(declared[:20]) > settings.body_cap:
        return Answer("too_large", 413, _NO_BODY)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > settings.body_cap:
                    return Answer("too_large", 413, _NO_BODY)
    except TimeoutError:
        return Answer("slow", 408, _NO_BODY)
    except ClientDisconnect:
        return Answer("gone", 400, _NO_BODY)
    return bytes(body)
