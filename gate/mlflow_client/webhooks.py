"""Register and test the service's webhook; rotate its secret."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gate.errors import RegistryError
from gate.mlflow_client.connection import calling, quiet_process
from gate.storage.safe_text import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.webhook import Webhook


EVENTS = (
    "registered_model.created",
    "model_version.created",
    "model_version_tag.set",
    "model_version_tag.deleted",
    "model_version_alias.created",
    "model_version_alias.deleted",
)
"""The events of our subscription, as MLflow writes them."""


_DESCRIPTION = "Parity gate: reviews, guards and deploys what is registered here."
_PAGE = 100


@dataclass(frozen=True)
class Subscription:
    """A webhook as the server describes it, without the secret."""

    webhook_id: str
    name: str
    url: str
    events: tuple[str, ...]
    active: bool


@dataclass(frozen=True)
class DeliveryTrial:
    """The result of a test delivery of one event."""

    event: str
    success: bool
    status: int | None
    answer: str


class WebhookSubscription:
    """The webhooks of the MLflow server at a tracking URI. Raises the registry's errors."""

    def __init__(self, tracking_uri: str) -> None:
        quiet_process()
        if not tracking_uri.startswith(("http://", "https://")):
            raise RegistryError(
                f"{redacted(tracking_uri)} is not a server, and only an MLflow server sends "
                "webhooks. Start one (mlflow server) and pass --tracking-uri http://…"
            )
        self._uri = tracking_uri

    def all(self) -> tuple[Subscription, ...]:
        """Return all webhooks of the server."""
        with self._using("list the webhooks") as client:
            webhooks: list[Webhook] = []
            token = None
            while True:
                page = client.list_webhooks(max_results=_PAGE, page_token=token)
                webhooks += page
                token = page.token
                if not token:
                    return tuple(map(_subscription, webhooks))

    def find(self, name: str) -> Subscription | None:
        """Return the webhook of this name, or None. Raises RegistryError if several have it."""
        matches = [webhook for webhook in self.all() if webhook.name == name]
        if len(matches) > 1:
            ids = ", ".join(webhook.webhook_id for webhook in matches)
            raise RegistryError(
                f"{len(matches)} webhooks are named '{name}': {ids}. Each would deliver every "
                "event. Delete all but one on the server, or choose another --name."
            )
        return matches[0] if matches else None

    def register(
        self, name: str, url: str, *, secret: str
    ) -> tuple[Literal["created", "updated"], Subscription]:
        """Create the webhook, or update the one with this name. Idempotent."""
        fields: dict[str, Any] = {
            "url": url,
            "events": list(EVENTS),
            "secret": secret,
            "description": _DESCRIPTION,
            "status": "ACTIVE",
        }
        existing = self.find(name)
        with self._using(f"register the webhook '{name}'") as client:
            if existing is None:
                return "created", _subscription(client.create_webhook(name, **fields))
            return "updated", _subscription(client.update_webhook(existing.webhook_id, **fields))

    def set_secret(self, webhook: Subscription, secret: str) -> None:
        """Replace the secret of the webhook. The server caches the old one for up to 60 s."""
        with self._using(f"update the webhook '{webhook.name}'") as client:
            client.update_webhook(webhook.webhook_id, secret=secret)

    def test(self, webhook: Subscription) -> tuple[DeliveryTrial, ...]:
        """Let the server send a test delivery of every event. Test deliveries have no effect.

        Stops at the first event without a response, because the server retries each for seconds.
        """
        trials = []
        with self._using(f"test the webhook '{webhook.name}'") as client:
            for event in webhook.events:
                result = client.test_webhook(webhook.webhook_id, event)  # type: ignore[arg-type]
                reply = (result.response_body or result.error_message or "")[:400]
                trials.append(DeliveryTrial(event, result.success, result.response_status, reply))
                if result.response_status is None:
                    break
        return tuple(trials)

    @contextmanager
    def _using(self, action: str) -> Iterator[MlflowClient]:
        with calling(self._uri, action):
            from mlflow import MlflowClient

            yield MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)


def _subscription(webhook: Webhook) -> Subscription:
    return Subscription(
        webhook_id=str(webhook.webhook_id),
        name=webhook.name,
        url=webhook.url,
        events=tuple(sorted(str(event) for event in webhook.events)),
        active=webhook.status.is_active(),
    )
