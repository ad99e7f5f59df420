"""Hosts that share nothing but MLflow and PostgreSQL: CI on one hands in, replicas of the service on
two others promote and deploy; whatever is killed, stopped or restarted, each line is there once.
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
from tests.end_to_end.hosts import Host, Program, hosts, signalled, why_one_user
from tests.end_to_end.stack import until, webhooks_allowed
from tests.exhaustive import exhaustive
from tests.ledger.rows import pending_in
from tests.registry.servers import ADMIN, Server, add_user, let_edit, serving
from tests.registry.signed import save, trust_in
from tests.service.postgres import MISSING, Postgres, postgres, program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.proof,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(program("initdb") is None, reason=MISSING),
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
        """Of a replica."""
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
        """A registered model that CI and the service may edit."""
        MlflowRegistry(self.server.uri).ensure_model(name)
        for user in ("ci", "gate"):
            let_edit(self.server.uri, user, model=name)
        return name

    def entries(self, model: str) -> list[LedgerEntry]:
        """What the ledger says of a model, of which a trusted writer signed the end; nothing while
        nobody can know."""
        trust = Trust.from_file(self.replicas[0].folder / "trust.yaml")
        with contextlib.suppress(StateUnavailable):
            entries = Ledger(self.database.url, trust=trust).entries()
            return [entry for entry in entries if entry.model == model]
        return []

    def lines(self, model: str) -> list[tuple[str, str | None, str]]:
        return [(e.action, e.version, e.actor) for e in self.entries(model)]

    def pending(self) -> str:
        """Ids of moves that are not finished."""
        return pending_in(self.database.url)

    def champion(self, model: str) -> str | None:
        return MlflowRegistry(self.server.uri).alias(model, CHAMPION)

    def live(self, host: Host, model: str) -> str | None:
        """The number of the version whose bytes a replica has deployed."""
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
        postgres() as database,
        serving(folder, guarded=True, environment=webhooks_allowed(folder)) as server,
        hosts("ci", "one", "two") as (ci, *replicas),
    ):
        for name, value in zip(("USERNAME", "PASSWORD"), ADMIN, strict=True):
            patch.setenv(f"MLFLOW_TRACKING_{name}", value)
        created = Deployment(server, database, ci, replicas)
        for user in (created.as_ci(), created.as_service()):
            add_user(server.uri, *user.values())
        _equip(created, folder)
        yield created


def _equip(deployment: Deployment, folder: Path) -> None:
    """Keys, trust, policy and secrets, for the user of each host alone."""
    measurer = SigningKey.make(folder / "ci.pem")
    deployment.ci.write("ci.pem", (folder / "ci.pem").read_text())
    deployment.ci.write("ci.pub", (folder / "ci.pub").read_text())
    writers = [SigningKey.make(folder / f"{host.name}.pem") for host in deployment.replicas]
    known = tuple(TrustedKey(**key.public.to_plain()) for key in writers)
    trust = save(trust_in(measurer, writers=known), folder / "trust.yaml").read_text()
    YAML(typ="safe").dump({"gate": POLICY.to_plain()}, folder / "policy.yaml")
    for host in deployment.replicas:
        host.write("ci.pem", (folder / "ci.pem").read_text())  # where gate promote runs, too
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


def documented_commands(who: str) -> list[list[str]]:
    """The commands of CI, or of each replica, as the documentation has them."""
    section = PAGE.partition("### Several hosts\n")[2].partition("\n### ")[0]
    (block,) = [b for b in section.split("```bash\n")[1:] if b.startswith(f"# {who}")]
    lines = block.partition("```")[0].replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


@dataclass
class Service:
    """`gate serve` on a host."""

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
            begun = stream.tell()
            self.process = self.host.start(
                "-m", *command, "--port", "0", "--interval", "1", "--log-format", "json",
                environment=self.deployment.as_service() | {"MLFLOW_TRACKING_URI": self.deployment.server.uri},
                stdout=stream, stderr=stream,
            )  # fmt: skip

        def found() -> str | None:
            assert self.process is not None
            assert self.process.poll() is None, log.read_text()[-3000:]
            lines = log.read_bytes()[begun:].decode().splitlines()
            return next((json.loads(e)["address"] for e in lines if '"listening"' in e), None)

        self.address = str(until(found, WAIT_S))

    def end(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            signalled(self.process, number)
        self.process.wait()

    @property
    def serves(self) -> str | None:
        """The digest of what it has deployed, as a client sees it."""
        with contextlib.suppress(httpx.HTTPError, KeyError):
            answer = plain_http.get(f"{self.address}/models/{self.model}/manifest.json", timeout=10)
            return str(answer.raise_for_status().json()["slots"][EXACT]["sha256"])
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
    """Until that version is champion, and each of them has deployed it."""

    def is_so() -> bool:
        lines = [
            e for e in deployment.entries("digits") if (e.action, e.version) == ("promoted", number)
        ]
        serving = {service.serves for service in services}
        return deployment.champion("digits") == number and serving == {str(e.sha256) for e in lines}

    assert until(is_so, WAIT_S), deployment.lines("digits")


KILLED = "killed"
KILL_POINTS = 15
"""Of a look or a promotion: a kill at the begin of each."""
KILLED_COMPONENTS = ("promoter", "service", "mlflow", "postgresql", "stopped", "clock")


@pytest.fixture(scope="module")
def killable(deployment: Deployment) -> Iterator[list[Program]]:
    """A promoter and a replica that are killed, or whose servers are, and a replica that reconciles
    afterwards."""
    first, two = deployment.replicas
    deployment.model(KILLED)
    _let_clock_jump(deployment.database.url)
    created = [
        Program(
            host, "-m", "tests.end_to_end.replica", json.dumps(deployment.settings(host, KILLED)),
            environment=user,
        )
        for host, user in ((first, deployment.as_ci()), (first, deployment.as_service()), (two, deployment.as_service()))
    ]  # fmt: skip
    yield created
    for each in created:
        each.end()


def _let_clock_jump(url: str, hours: int = 0) -> None:
    """Have the database's own clock, by which leases end, be so many hours ahead."""
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
    """How many calls of the registry and the database a look and a promotion make, that replace a
    champion."""
    promoter, *replicas = killable
    counts = {}
    for _ in range(2):
        ci.ask(seed=next(SEEDS), model=KILLED)
        look = replicas[0].ask()
        result = promoter.ask(promote=next(SEEDS))
        assert look["failed"] == result["failed"] == []
        counts = {"look": len(look["steps"]), "promotion": len(result["steps"])}
        for each in replicas:
            each.ask()
    return counts


@pytest.mark.rows(76)  # a killed promoter, and a service that stops until its lease is over
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
    """`part`: of all calls of the registry and the database, before one of which it happens. MLflow
    and PostgreSQL are away then, until the promotion or the look that made the call has ended."""
    promoter, replica, two = killable
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
        # By its lease the lock is still held after the short time of a jump, and not after a stop.
        lease = {"lease_s": 15.0} if hours else {}
        assert first.ask(**order, **lease, signal=signal.SIGSTOP) == {"stopped": True}
        if component == "mlflow":
            deployment.server.kill()
        elif component == "postgresql":
            deployment.database.stop()
        elif component == "clock":
            _let_clock_jump(deployment.database.url, hours)
            two.ask()
        else:
            two.ask()
        first.ask(**{"continue": True})
        if component == "mlflow":
            deployment.server.start()
        elif component == "postgresql":
            deployment.database.start()
    assert two.ask(lease_s=15.0)["failed"] == []
    champion = deployment.champion(KILLED)
    moves = [e for e in deployment.entries(KILLED) if e.operation and e.action != "conflict"]
    assert champion == moves[-1].version
    assert deployment.pending() == ""
    assert number is None or champion == number
    assert deployment.live(two.host, KILLED) == champion
    assert two.ask()["done"] == 0
    moved = Counter(e.version for e in moves)
    assert set(moved.values()) == {1}, moved


def test_submission_from_ci_is_deployed_by_both_replicas(
    deployment: Deployment, services: list[Service]
) -> None:
    for name, documented_name in FILES.items():
        shutil.copy(small_project.made() / name, deployment.ci.folder / documented_name)
        (deployment.ci.folder / documented_name).chmod(0o644)
    policy = (deployment.replicas[0].folder / "policy.yaml").read_text()
    deployment.ci.write("policy.yaml", policy)
    environment = deployment.as_ci() | {
        "MLFLOW_TRACKING_URI": deployment.server.uri, "GATE_SIGNING_KEY": "ci.pem",
        "GATE_TRUST": "ci-trust.yaml",
    }  # fmt: skip
    for command in documented_commands("CI")[1:]:  # the service has to trust the key already
        words, _, target = " ".join(command).partition(" > ")
        result = deployment.ci.run("-m", *words.split(), **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        if target:
            deployment.ci.write(target, result.stdout)
    assert "handed in" in result.stdout
    assert not (deployment.ci.folder / ".gate" / "state.db").exists()  # it has no ledger
    wait_until_all_serve(deployment, "1", *services)


def test_hosts_cannot_read_each_others_files(deployment: Deployment) -> None:
    why = why_one_user()
    if why is not None:
        pytest.skip(why)
    first = deployment.replicas[0]
    for host, second in (
        (deployment.ci, first),
        (first, deployment.ci),
        (first, deployment.replicas[1]),
    ):
        look = f"import os; os.listdir({str(second.folder)!r})"
        assert "PermissionError" in host.run("-c", look).stderr


@exhaustive
def test_submission_survives_postgresql_restarts(
    deployment: Deployment, ci: Program, services: list[Service]
) -> None:
    ci.order(seed=next(SEEDS), model="digits")
    deployment.database.restart()
    number = ci.answer()["version"]
    deployment.database.restart()
    wait_until_all_serve(deployment, number, *services)
