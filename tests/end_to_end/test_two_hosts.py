"""CI and two replicas of the service run on hosts that share only MLflow and PostgreSQL.

Each ledger entry is written once, whichever process is killed, stopped or restarted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from ruamel.yaml import YAML

from gate.deploy.store import EXACT, ModelStore
from gate.errors import StateUnavailable
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.interface import CHAMPION
from gate.signing.keys import SigningKey
from gate.signing.trust import Trust, TrustedKey
from tests import plain_http, small_project
from tests.end_to_end.ci import POLICY
from tests.end_to_end.hosts import Host, Program, create_hosts, send_signal, shared_user_reason
from tests.end_to_end.stack import wait_for, webhook_environment
from tests.exhaustive import exhaustive
from tests.ledger.rows import pending_moves
from tests.registry.servers import ADMIN, Server, add_user, grant_edit, run_mlflow_server
from tests.registry.signed import save_trust, trust_in
from tests.service.postgres import MISSING, Postgres, find_program, run_postgres

pytestmark = [
    pytest.mark.slow,
    pytest.mark.proof,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_program("initdb") is None, reason=MISSING),
]

PAGE = (Path(__file__).parents[2] / "docs" / "production.md").read_text(encoding="utf-8")
FILES = {"good.onnx": "model.onnx", "images.npy": "samples.npy", "small_models.py": "mymodel.py"}
WAIT_S = 300.0
SEEDS = itertools.count(1)


@dataclass
class Deployment:
    server: Server
    database: Postgres
    ci: Host
    replicas: list[Host]

    def settings(self, host: Host, model: str) -> dict[str, Any]:
        """Return the settings of a replica."""
        return {
            "models": [model], "tracking_uri": self.server.uri, "state": self.database.url,
            "store": str(host.folder / "store"), "policy": str(host.folder / "policy.yaml"),
            "trust": str(host.folder / "trust.yaml"), "key": str(host.folder / "service.pem"),
            "secret_file": str(host.folder / "secrets"),
        }  # fmt: skip

    def as_service(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_USERNAME": "gate", "MLFLOW_TRACKING_PASSWORD": "password-of-gate"}

    def as_ci(self) -> dict[str, str]:
        return {"MLFLOW_TRACKING_USERNAME": "ci", "MLFLOW_TRACKING_PASSWORD": "password-of-ci-"}

    def model(self, name: str) -> str:
        """Create a registered model that CI and the service may edit."""
        MlflowRegistry(self.server.uri).ensure_model(name)
        for user in ("ci", "gate"):
            grant_edit(self.server.uri, user, model=name)
        return name

    def entries(self, model: str) -> list[LedgerEntry]:
        """Return the entries of a model, or an empty list while the database is unavailable."""
        trust = Trust.from_file(self.replicas[0].folder / "trust.yaml")
        with contextlib.suppress(StateUnavailable):
            entries = Ledger(self.database.url, trust=trust).entries()
            return [entry for entry in entries if entry.model == model]
        return []

    def lines(self, model: str) -> list[tuple[str, str | None, str]]:
        return [(e.action, e.version, e.actor) for e in self.entries(model)]

    def pending(self) -> str:
        """Return the ids of the pending moves."""
        return pending_moves(self.database.url)

    def champion(self, model: str) -> str | None:
        return MlflowRegistry(self.server.uri).alias(model, CHAMPION)

    def live(self, host: Host, model: str) -> str | None:
        """Return the number of the version that a replica has deployed."""
        manifest = ModelStore(host.folder / "store").live(model)
        if manifest is None:
            return None
        expected = manifest.slots[EXACT].sha256
        return next(e.version for e in self.entries(model) if e.sha256 == expected)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("mlflow")
    with (
        pytest.MonkeyPatch.context() as patch,
        run_postgres() as database,
        run_mlflow_server(folder, guarded=True, environment=webhook_environment(folder)) as server,
        create_hosts("ci", "one", "two") as (ci, *replicas),
    ):
        for name, value in zip(("USERNAME", "PASSWORD"), ADMIN, strict=True):
            patch.setenv(f"MLFLOW_TRACKING_{name}", value)
        created = Deployment(server, database, ci, replicas)
        for user in (created.as_ci(), created.as_service()):
            add_user(server.uri, *user.values())
        _write_host_files(created, folder)
        yield created


def _write_host_files(deployment: Deployment, folder: Path) -> None:
    """Write keys, trust, policy and secrets, readable by the user of each host only."""
    measurer = SigningKey.make(folder / "ci.pem")
    deployment.ci.write("ci.pem", (folder / "ci.pem").read_text())
    deployment.ci.write("ci.pub", (folder / "ci.pub").read_text())
    writers = [SigningKey.make(folder / f"{host.name}.pem") for host in deployment.replicas]
    writer_keys = tuple(TrustedKey(**key.public.to_plain()) for key in writers)
    trust = save_trust(trust_in(measurer, writers=writer_keys), folder / "trust.yaml").read_text()
    YAML(typ="safe").dump({"gate": POLICY.to_plain()}, folder / "policy.yaml")
    for host in deployment.replicas:
        host.write("ci.pem", (folder / "ci.pem").read_text())  # `gate promote` runs here, too
        host.write("service.pem", (folder / f"{host.name}.pem").read_text())
        host.write("trust.yaml", trust)
        host.write("policy.yaml", (folder / "policy.yaml").read_text())
        host.write("secrets", "s" * 40 + "\n")


@pytest.fixture(scope="module")
def ci(deployment: Deployment) -> Iterator[Program]:
    created = Program(
        deployment.ci, "-m", "tests.end_to_end.ci", deployment.server.uri, "ci.pem",
        environment=deployment.as_ci(),
    )  # fmt: skip
    yield created
    created.end()


def documented_commands(host: str) -> list[list[str]]:
    """Return the commands of CI or of each replica from the documentation."""
    section = PAGE.partition("### Several hosts\n")[2].partition("\n### ")[0]
    (block,) = [b for b in section.split("```bash\n")[1:] if b.startswith(f"# {host}")]
    lines = block.partition("```")[0].replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


@dataclass
class Service:
    """The process `gate serve` on a host."""

    deployment: Deployment
    host: Host
    model: str
    address: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        log = self.host.folder.parent / f"{self.host.name}-serve.log"
        url = self.deployment.database.url
        command = [
            url if "://" in word else word for word in documented_commands("Each replica")[-1]
        ]
        with log.open("a") as stream:
            log_start = stream.tell()
            self.process = self.host.start(
                "-m", *command, "--port", "0", "--interval", "1", "--log-format", "json",
                environment=self.deployment.as_service() | {"MLFLOW_TRACKING_URI": self.deployment.server.uri},
                stdout=stream, stderr=stream,
            )  # fmt: skip

        def read_address() -> str | None:
            assert self.process is not None
            assert self.process.poll() is None, log.read_text()[-3000:]
            lines = log.read_bytes()[log_start:].decode().splitlines()
            return next((json.loads(e)["address"] for e in lines if '"listening"' in e), None)

        self.address = str(wait_for(read_address, WAIT_S))

    def end(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            send_signal(self.process, number)
        self.process.wait()

    @property
    def serves(self) -> str | None:
        """Return the deployed digest from the service's HTTP API."""
        with contextlib.suppress(httpx.HTTPError, KeyError):
            response = plain_http.get(
                f"{self.address}/models/{self.model}/manifest.json", timeout=10
            )
            return str(response.raise_for_status().json()["slots"][EXACT]["sha256"])
        return None


@pytest.fixture(scope="module")
def services(deployment: Deployment) -> Iterator[list[Service]]:
    model = deployment.model("digits")
    created = [Service(deployment, host, model) for host in deployment.replicas]
    for each in created:
        each.start()
    for each in created:
        completed = subprocess.run(
            [sys.executable, "-m", "gate", "webhooks", "register", "--tracking-uri",
             deployment.server.uri, "--url", f"{each.address}/webhooks/mlflow", "--name",
             each.host.name, "--secret-file", str(each.host.folder / "secrets")],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert completed.returncode == 0, completed.stderr
    yield created
    for each in created:
        each.end(signal.SIGKILL)


def wait_until_all_serve(deployment: Deployment, number: str, *services: Service) -> None:
    """Wait until the version is champion and all services have deployed it."""

    def all_serve() -> bool:
        lines = [
            e for e in deployment.entries("digits") if (e.action, e.version) == ("promoted", number)
        ]
        run_mlflow_server = {service.serves for service in services}
        return deployment.champion("digits") == number and run_mlflow_server == {
            str(e.sha256) for e in lines
        }

    assert wait_for(all_serve, WAIT_S), deployment.lines("digits")


KILLED = "killed"
KILL_POINTS = 15
"""Number of steps of a pass or a promotion before which a process is killed."""
KILLED_COMPONENTS = ("promoter", "service", "mlflow", "postgresql", "stopped", "clock")


@pytest.fixture(scope="module")
def killable(deployment: Deployment) -> Iterator[list[Program]]:
    """A promoter and a replica to interrupt, and a replica that reconciles afterwards."""
    first, second = deployment.replicas
    deployment.model(KILLED)
    _let_clock_jump(deployment.database.url)
    created = [
        Program(
            host, "-m", "tests.end_to_end.replica", json.dumps(deployment.settings(host, KILLED)),
            environment=user,
        )
        for host, user in ((first, deployment.as_ci()), (first, deployment.as_service()), (second, deployment.as_service()))
    ]  # fmt: skip
    yield created
    for each in created:
        each.end()


def _let_clock_jump(url: str, hours: int = 0) -> None:
    """Set the clock of the database, which ends the leases, ahead by `hours`."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (
            "CREATE SCHEMA IF NOT EXISTS jumping",
            "CREATE OR REPLACE FUNCTION jumping.clock_timestamp() RETURNS timestamptz AS $$ "
            f"SELECT pg_catalog.clock_timestamp() + interval '{hours:d} hours' $$ LANGUAGE sql",
            "ALTER ROLE gate SET search_path = public, jumping, pg_catalog",
        ):
            connection.execute(statement.encode())


@pytest.fixture(scope="module")
def calls(deployment: Deployment, ci: Program, killable: list[Program]) -> dict[str, int]:
    """Number of calls of a reconcile pass and of a promotion that replace a champion."""
    promoter, *replicas = killable
    counts = {}
    for _ in range(2):
        ci.ask(seed=next(SEEDS), model=KILLED)
        reconciled = replicas[0].ask()
        result = promoter.ask(promote=next(SEEDS))
        assert reconciled["failed"] == result["failed"] == []
        counts = {"look": len(reconciled["steps"]), "promotion": len(result["steps"])}
        for each in replicas:
            each.ask()
    return counts


@pytest.mark.rows(76)  # the service is stopped until its lease has expired
@pytest.mark.parametrize(
    ("part", "component"),
    [(part, component) for part in range(KILL_POINTS) for component in KILLED_COMPONENTS],
)
def test_one_reconcile_restores_champion_after_any_kill(
    deployment: Deployment,
    ci: Program,
    killable: list[Program],
    calls: dict[str, int],
    part: int,
    component: str,
) -> None:
    """Signal the process before one of its calls; `part` is the position among all calls.

    MLflow or PostgreSQL stay down until the interrupted promotion or pass has ended.
    """
    promoter, replica, second = killable
    is_promotion = component == "promoter" or (component != "service" and part % 2 == 1)
    first, number = promoter if is_promotion else replica, None
    if is_promotion:
        order: dict[str, Any] = {"promote": next(SEEDS)}
    else:
        number, order = ci.ask(seed=next(SEEDS), model=KILLED)["version"], {}
    at = part * calls["promotion" if is_promotion else "look"] // KILL_POINTS
    order["at"] = at
    if component in ("promoter", "service"):
        assert first.ask(**order, signal=signal.SIGKILL) == {"killed": True}
    else:
        hours = {"clock": 24 if part % 4 < 2 else -24}.get(component, 0)
        # The lease outlasts a clock jump but not a stop.
        lease = {"lease_s": 15.0} if hours else {}
        assert first.ask(**order, **lease, signal=signal.SIGSTOP) == {"stopped": True}
        if component == "mlflow":
            deployment.server.kill()
        elif component == "postgresql":
            deployment.database.stop()
        elif component == "clock":
            _let_clock_jump(deployment.database.url, hours)
            second.ask()
        else:
            second.ask()
        first.ask(**{"continue": True})
        if component == "mlflow":
            deployment.server.start()
        elif component == "postgresql":
            deployment.database.start()
    assert second.ask(lease_s=15.0)["failed"] == []
    champion = deployment.champion(KILLED)
    moves = [e for e in deployment.entries(KILLED) if e.operation and e.action != "conflict"]
    assert champion == moves[-1].version
    assert deployment.pending() == ""
    assert number is None or champion == number
    assert deployment.live(second.host, KILLED) == champion
    assert second.ask()["done"] == 0
    moved = Counter(e.version for e in moves)
    assert set(moved.values()) == {1}, moved


def test_submission_from_ci_is_deployed_by_both_replicas(
    deployment: Deployment, services: list[Service]
) -> None:
    for name, documented_name in FILES.items():
        shutil.copy(small_project.create_project() / name, deployment.ci.folder / documented_name)
        (deployment.ci.folder / documented_name).chmod(0o644)
    policy = (deployment.replicas[0].folder / "policy.yaml").read_text()
    deployment.ci.write("policy.yaml", policy)
    environment = deployment.as_ci() | {
        "MLFLOW_TRACKING_URI": deployment.server.uri, "GATE_SIGNING_KEY": "ci.pem",
        "GATE_TRUST": "ci-trust.yaml",
    }  # fmt: skip
    for command in documented_commands("CI")[1:]:  # the service already has to trust the key
        words, _, target = " ".join(command).partition(" > ")
        result = deployment.ci.run("-m", *words.split(), **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        if target:
            deployment.ci.write(target, result.stdout)
    assert "handed in" in result.stdout
    assert not (deployment.ci.folder / ".gate" / "state.db").exists()  # CI has no ledger
    wait_until_all_serve(deployment, "1", *services)


def test_hosts_cannot_read_each_others_files(deployment: Deployment) -> None:
    reason = shared_user_reason()
    if reason is not None:
        pytest.skip(reason)
    first = deployment.replicas[0]
    for host, second in (
        (deployment.ci, first),
        (first, deployment.ci),
        (first, deployment.replicas[1]),
    ):
        script = f"import os; os.listdir({str(second.folder)!r})"
        assert "PermissionError" in host.run("-c", script).stderr


@exhaustive
def test_submission_survives_postgresql_restarts(
    deployment: Deployment, ci: Program, services: list[Service]
) -> None:
    ci.order(seed=next(SEEDS), model="digits")
    deployment.database.restart()
    number = ci.answer()["version"]
    deployment.database.restart()
    wait_until_all_serve(deployment, number, *services)
