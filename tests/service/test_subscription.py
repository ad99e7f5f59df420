"""Webhook subscriptions on a real MLflow server: registered, tested, notified, rotated."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from gate import cli
from gate.commands.service import rotate, secret_for
from gate.errors import RegistryError, RegistryUnavailable, ServiceError
from gate.mlflow_client.connection import quiet_process, using_tracking_uri
from gate.mlflow_client.webhooks import EVENTS, WebhookSubscription
from gate.service.app import WEBHOOK_PATH
from gate.service.settings import WebhookSecrets
from tests.registry.servers import run_mlflow_server
from tests.service.deliveries import SECRET, Service, run_service, settings, wait_until

pytestmark = pytest.mark.proof
NAME = "parity-gate"


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_WEBHOOK_ALLOWED_SCHEMES", "http,https")
        patch.setenv("MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS", "true")
        patch.setenv("MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY", Fernet.generate_key().decode())
        patch.setenv("MLFLOW_WEBHOOK_CACHE_TTL", "1")
        patch.setenv("MLFLOW_WEBHOOK_REQUEST_MAX_RETRIES", "1")
        with run_mlflow_server(tmp_path_factory.mktemp("mlflow")) as server:
            yield server.uri


@pytest.fixture
def subscriptions(mlflow_server: str) -> Iterator[WebhookSubscription]:
    result = WebhookSubscription(mlflow_server)
    yield result
    for webhook in result.all():
        with result._using("clean up") as client:
            client.delete_webhook(webhook.webhook_id)


@pytest.fixture
def service(tmp_path: Path, mlflow_server: str) -> Iterator[Service]:
    service_settings = settings(tmp_path, tracking_uri=mlflow_server)
    with run_service(service_settings) as started:
        yield started


def trigger_events(uri: str, model: str, *, alias: str) -> None:
    """Create a version, move an alias and set a tag, as in MLflow's web interface."""
    quiet_process()
    with using_tracking_uri(uri):
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        versions = client.search_model_versions(f"name = '{model}'")
        if not versions:
            client.create_registered_model(model)
            client.create_model_version(model, "s3://nowhere/model")
        client.set_registered_model_alias(model, alias, "1")
        client.set_model_version_tag(model, "1", "gate.review", "approved")


def delivery_outcomes(service: Service) -> dict[str, int]:
    lines = service.get("/metrics").text.splitlines()
    matches = [line for line in lines if line.startswith("parity_gate_deliveries_total{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in matches}


@pytest.mark.slow
def test_registered_webhook_delivers_events(
    service: Service, subscriptions: WebhookSubscription
) -> None:
    url = service.address + WEBHOOK_PATH
    outcome, created = subscriptions.register(NAME, url, secret=SECRET)
    assert (outcome, created.url, created.events, created.active) == ("created", url, tuple(sorted(EVENTS)), True)  # fmt: skip

    trials = subscriptions.test(created)
    assert [trial.event for trial in trials] == sorted(EVENTS)
    assert {(trial.success, trial.status, trial.answer) for trial in trials} == {
        (True, 200, '{"outcome":"test"}')
    }
    assert delivery_outcomes(service) == {"test": len(EVENTS)}

    time.sleep(1.5)  # until the server's webhook cache expires
    trigger_events(subscriptions._uri, "digits", alias="champion")
    wait_until(
        lambda: delivery_outcomes(service).get("accepted") == 4
    )  # events of model, version, alias and tag
    assert {model for model, cause in service.recorder.calls if cause != "timer"} == {"digits"}

    trigger_events(subscriptions._uri, "others", alias="champion")
    wait_until(lambda: delivery_outcomes(service).get("foreign") == 4)


def test_registering_again_updates_the_webhook(subscriptions: WebhookSubscription) -> None:
    first = subscriptions.register(NAME, "http://127.0.0.1:1/a", secret=SECRET)[1]
    with subscriptions._using("spoil it") as client:
        client.update_webhook(first.webhook_id, status="DISABLED", events=[EVENTS[0]])
    outcome, second = subscriptions.register(NAME, "http://127.0.0.1:1/b", secret=SECRET)
    assert (outcome, second.webhook_id, second.url) == ("updated", first.webhook_id, "http://127.0.0.1:1/b")  # fmt: skip
    assert (second.active, second.events) == (True, tuple(sorted(EVENTS)))
    assert len(subscriptions.all()) == 1
    subscriptions.register("another", "http://127.0.0.1:1/b", secret=SECRET)
    assert len(subscriptions.all()) == 2


def test_two_webhooks_of_one_name_are_refused(subscriptions: WebhookSubscription) -> None:
    with subscriptions._using("make two") as client:
        for _ in range(2):
            client.create_webhook(NAME, "http://127.0.0.1:1/", [EVENTS[0]])
    with pytest.raises(RegistryError, match="2 webhooks are named"):
        subscriptions.register(NAME, "http://127.0.0.1:1/", secret=SECRET)


def test_trial_delivery_reports_the_failure(
    service: Service, subscriptions: WebhookSubscription
) -> None:
    url = service.address + WEBHOOK_PATH
    webhook = subscriptions.register(NAME, url, secret="the service does not know it")[1]
    assert {(trial.success, trial.status) for trial in subscriptions.test(webhook)} == {(False, 401)}  # fmt: skip
    webhook = subscriptions.register(NAME, "http://127.0.0.1:1/", secret=SECRET)[1]
    (trial,) = subscriptions.test(webhook)  # after the first failure no further events are tried
    assert (trial.success, trial.status) == (False, None)
    assert "refused" in trial.answer


@pytest.mark.slow
def test_rotation_refuses_no_delivery(
    service: Service, subscriptions: WebhookSubscription, tmp_path: Path
) -> None:
    path = tmp_path / "secrets"
    before = WebhookSecrets.from_file(path).secrets
    url = service.address + WEBHOOK_PATH
    webhook = subscriptions.register(NAME, url, secret=before[0])[1]
    time.sleep(1.5)
    observed: list[tuple[str, ...]] = []

    def send_events_during_overlap(_seconds: float) -> None:
        observed.append(WebhookSecrets.from_file(path).secrets)
        trigger_events(
            subscriptions._uri, "digits", alias="champion"
        )  # still signed with the old secret
        time.sleep(1.5)
        trigger_events(subscriptions._uri, "digits", alias="champion")  # signed with the new secret

    trials = rotate(subscriptions, webhook, path, overlap_s=1, sleep=send_events_during_overlap)
    assert all(trial.success for trial in trials)
    after = WebhookSecrets.from_file(path).secrets
    assert len(after) == 1
    assert after[0] not in before
    assert observed == [(after[0], *before)]
    trigger_events(subscriptions._uri, "digits", alias="champion")
    wait_until(lambda: delivery_outcomes(service).get("accepted", 0) >= 6)
    assert "forged" not in delivery_outcomes(service)
    assert service.send({}, secret=SECRET).status_code == 401  # the old secret is no longer valid


def test_refused_rotation_keeps_both_secrets(
    service: Service, subscriptions: WebhookSubscription, tmp_path: Path
) -> None:
    webhook = subscriptions.register(NAME, service.address + WEBHOOK_PATH, secret=SECRET)[1]
    path = tmp_path / "another file"
    secret_for(path)
    old = WebhookSecrets.from_file(path).secrets
    with pytest.raises(ServiceError, match="refuses the new secret.*both|Old and new"):
        rotate(subscriptions, webhook, path, overlap_s=0)
    assert WebhookSecrets.from_file(path).secrets[1:] == old


def test_database_registry_is_refused() -> None:
    with pytest.raises(RegistryError, match="only an MLflow server") as raised:
        WebhookSubscription("postgresql://gate:secret@db/mlflow")
    assert "secret" not in str(raised.value)


def test_unreachable_server_is_reported() -> None:
    with pytest.raises(RegistryUnavailable):
        WebhookSubscription("http://127.0.0.1:1").all()


class TestCommands:
    """The `gate webhooks` commands, with and without --json."""

    def call(self, capsys, *arguments: str, code: int = 0) -> dict:
        capsys.readouterr()
        assert cli.main(["webhooks", *arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    def test_register_list_test_and_rotate(
        self, service: Service, subscriptions: WebhookSubscription, tmp_path: Path, capsys
    ) -> None:
        at = ("--tracking-uri", subscriptions._uri)
        file = str(tmp_path / "secrets")
        url = service.address + WEBHOOK_PATH
        register = ("register", "--url", url, "--secret-file", file, *at)
        assert self.call(capsys, *register)["outcome"] == "created"
        assert self.call(capsys, *register)["outcome"] == "updated"
        (listed,) = self.call(capsys, "list", *at)["webhooks"]
        assert (listed["name"], listed["url"]) == (NAME, url)
        trials = self.call(capsys, "test", *at)["trials"]
        assert [trial["status"] for trial in trials] == [200] * len(EVENTS)
        rotation = ("rotate", "--secret-file", file, "--overlap", "0", *at)
        assert self.call(capsys, *rotation)["exit_code"] == 0
        assert SECRET not in Path(file).read_text()
        assert cli.main(["webhooks", "list", *at]) == 0
        assert NAME in capsys.readouterr().out
        assert cli.main(["webhooks", "test", *at]) == 0
        assert "ok" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["test"], "no webhook named"),
            (["rotate", "--secret-file", "x"], "no webhook named"),
            (["rotate"], "can't be replaced"),
            (["register"], "GATE_WEBHOOK_SECRETS"),
        ],
    )
    def test_invalid_webhook_commands_are_refused(
        self,
        subscriptions: WebhookSubscription,
        capsys,
        monkeypatch,
        arguments: list[str],
        expected: str,
    ) -> None:
        for name in ("GATE_WEBHOOK_SECRETS", "GATE_SECRET_FILE"):
            monkeypatch.delenv(name, raising=False)
        assert cli.main(["webhooks", *arguments, "--tracking-uri", subscriptions._uri]) == 2
        assert expected in capsys.readouterr().err
