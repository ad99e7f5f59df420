"""A service that trusts keys, for many models."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from ruamel.yaml import YAML

from gate.deploy.store import MANIFEST
from gate.ledger.ledger import Ledger
from gate.policy.policy import Policy
from gate.service import settings
from gate.signing.trust import Trust
from tests import plain_http
from tests.end_to_end.hands import SERVICE, Keys, acting_as
from tests.end_to_end.stack import Stack
from tests.registry.servers import ADMIN
from tests.registry.signed import save

QUICK = Path(__file__).with_name("quick_serve.py")
"""Starts a service that reads foreign files in its own process."""


@dataclass
class SignedStack(Stack):
    """A service with a trust, for many models; CI knows its address and no more."""

    models: tuple[str, ...] = ()
    policy: Policy = field(default_factory=Policy)
    keys: Keys | None = None
    wrapper: Path | None = None

    def __post_init__(self) -> None:
        self._client = plain_http.client(timeout=30)

    @property
    def operators(self) -> Ledger:
        """The ledger, in the hands of who has the service's key."""
        assert self.keys is not None
        return Ledger(self.ledger.state, key=self.keys["writer"])

    def begin(self, trust: Trust) -> None:
        """Start it with a trust of its own."""
        assert self.keys is not None
        self.folder.mkdir()
        YAML(typ="safe").dump({"gate": self.policy.to_plain()}, self.folder / "policy.yaml")
        save(trust, self.folder / "trust.yaml")
        settings.write(self.folder / "secrets", ["s" * 40])
        self.again()

    def again(self) -> None:
        """Start the service, and have the server send its events to where it listens now."""
        assert self.keys is not None
        named = [option for model in self.models[1:] for option in ("--model", model)]
        trusting = ("--trust", str(self.folder / "trust.yaml"))
        with acting_as(SERVICE):
            self.launch(
                *named, *trusting, "--key", str(self.keys.path("writer")), wrapper=self.wrapper
            )
        with acting_as(ADMIN):
            self.unregister()
            self.register()

    @property
    def log(self) -> str:
        """What the service logged."""
        return (self.folder / "service.log").read_text()

    def end(self) -> None:
        """Stop it, whatever it does."""
        self._client.close()
        with acting_as(ADMIN):
            self.unregister()
        if self.service is not None and self.service.poll() is None:
            self.stop(signal.SIGKILL)

    def served(self, model: str) -> tuple[dict[str, Any], bytes] | None:
        """The manifest and the bytes of a model, as clients see them."""
        manifest = self._get(f"models/{model}/{MANIFEST}")
        if manifest.status_code == 404:
            return None
        data = self._get(f"models/{model}/model.onnx").raise_for_status().content
        return manifest.raise_for_status().json(), data

    def metric(self, name: str) -> float:
        """The sum of a metric over all its labels."""
        lines = self._get("metrics").raise_for_status().text.splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def ready(self) -> tuple[int, str]:
        """Whether it is ready, and what it says of the ledger."""
        answer = self._get("readyz")
        return answer.status_code, str(answer.json()["ledger"])

    def _get(self, path: str) -> httpx.Response:
        return self._client.get(f"{self.address}/{path}")


@contextmanager
def running(stack: SignedStack, trust: Trust) -> Iterator[SignedStack]:
    """The service, until the block ends."""
    try:
        stack.begin(trust)
        yield stack
    finally:
        stack.end()
