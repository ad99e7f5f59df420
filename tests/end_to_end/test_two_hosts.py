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
from gate.registry.interface import CHAMPION, Tag
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
class World:
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
        wanted = manifest.slots[EXACT].sha256
        return next(e.version for e in self.entries(model) if e.sha256 == wanted)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("mlflow")
    with (
        pytest.MonkeyPatch.context() as patch,
        postgres() as database,
        serving(folder, guarded=True, environment=webhooks_allowed(folder)) as server,
        hosts("ci", "one", "two") as (ci, *replicas),
    ):
        for name, value in zip(("USERNAME", "PASSWORD"), ADMIN, strict=True):
            patch.setenv(f"MLFLOW_TRACKING_{name}", value)
        made = World(server, database, ci, replicas)
        for user in (made.as_ci(), made.as_service()):
            add_user(server.uri, *user.values())
        _equip(made, folder)
        yield made


def _equip(world: World, folder: Path) -> None:
    """Keys, trust, policy and secrets, for the user of each host alone."""
    measurer = SigningKey.make(folder / "ci.pem")
    world.ci.write("ci.pem", (folder / "ci.pem").read_text())
    world.ci.write("ci.pub", (folder / "ci.pub").read_text())
    writers = [SigningKey.make(folder / f"{host.name}.pem") for host in world.replicas]
    known = tuple(TrustedKey(**key.public.to_plain()) for key in writers)
    trust = save(trust_in(measurer, writers=known), folder / "trust.yaml").read_text()
    YAML(typ="safe").dump({"gate": POLICY.to_plain()}, folder / "policy.yaml")
    for host in world.replicas:
        host.write("ci.pem", (folder / "ci.pem").read_text())  # where gate promote runs, too
        host.write("service.pem", (folder / f"{host.name}.pem").read_text())
        host.write("trust.yaml", trust)
        host.write("policy.yaml", (folder / "policy.yaml").read_text())
        host.write("secrets", "s" * 40 + "\n")


@pytest.fixture(scope="module")
def ci(world: World) -> Iterator[Program]:
    made = Program(
        world.ci, "-m", "tests.end_to_end.ci", world.server.uri, "ci.pem",
        environment=world.as_ci(),
    )  # fmt: skip
    yield made
    made.end()


def documented(who: str) -> list[list[str]]:
    """The commands of CI, or of each replica, as the documentation has them."""
    section = PAGE.partition("### Several hosts\n")[2].partition("\n### ")[0]
    (block,) = [b for b in section.split("```bash\n")[1:] if b.startswith(f"# {who}")]
    lines = block.partition("```")[0].replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


@dataclass
class Service:
    """`gate serve` on a host."""

    world: World
    host: Host
    model: str
    address: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        log = self.host.folder.parent / f"{self.host.name}-serve.log"
        url = self.world.database.url
        command = [url if "://" in word else word for word in documented("Each replica")[-1]]
        with log.open("a") as stream:
            begun = stream.tell()
            self.process = self.host.start(
                "-m", *command, "--port", "0", "--interval", "1", "--log-format", "json",
                environment=self.world.as_service() | {"MLFLOW_TRACKING_URI": self.world.server.uri},
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
def services(world: World) -> Iterator[list[Service]]:
    model = world.model("digits")
    made = [Service(world, host, model) for host in world.replicas]
    for each in made:
        each.start()
    for each in made:
        done = subprocess.run(
            [sys.executable, "-m", "gate", "webhooks", "register", "--tracking-uri",
             world.server.uri, "--url", f"{each.address}/webhooks/mlflow", "--name",
             each.host.name, "--secret-file", str(each.host.folder / "secrets")],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    yield made
    for each in made:
        each.end(signal.SIGKILL)


def wait_until_all_serve(world: World, number: str, *services: Service) -> None:
    """Until that version is champion, and each of them has deployed it."""

    def is_so() -> bool:
        lines = [
            e for e in world.entries("digits") if (e.action, e.version) == ("promoted", number)
        ]
        serving = {service.serves for service in services}
        return world.champion("digits") == number and serving == {str(e.sha256) for e in lines}

    assert until(is_so, WAIT_S), world.lines("digits")


KILLED = "killed"
PARTS = 15
"""Of a look or a promotion: a kill at the begin of each."""
VICTIMS = ("promoter", "service", "mlflow", "postgresql", "stopped", "clock")


@pytest.fixture(scope="module")
def killed(world: World) -> Iterator[list[Program]]:
    """A promoter and a replica that are killed, or whose servers are, and a replica that reconciles
    afterwards."""
    one, two = world.replicas
    world.model(KILLED)
    _let_clock_jump(world.database.url)
    made = [
        Program(
            host, "-m", "tests.end_to_end.replica", json.dumps(world.settings(host, KILLED)),
            environment=user,
        )
        for host, user in ((one, world.as_ci()), (one, world.as_service()), (two, world.as_service()))
    ]  # fmt: skip
    yield made
    for each in made:
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
def calls(world: World, ci: Program, killed: list[Program]) -> dict[str, int]:
    """How many calls of the registry and the database a look and a promotion make, that replace a
    champion."""
    promoter, *replicas = killed
    counts = {}
    for _ in range(2):
        ci.ask(seed=next(SEEDS), model=KILLED)
        look = replicas[0].ask()
        done = promoter.ask(promote=next(SEEDS))
        assert look["failed"] == done["failed"] == []
        counts = {"look": len(look["steps"]), "promotion": len(done["steps"])}
        for each in replicas:
            each.ask()
    return counts


@pytest.mark.rows(19)  # one of five victims, in five parts of a move
@pytest.mark.parametrize(
    ("part", "victim"), [(part, victim) for part in range(PARTS) for victim in VICTIMS]
)
def test_whatever_is_killed_one_reconcile_puts_champion_where_the_ledger_says(
    world: World,
    ci: Program,
    killed: list[Program],
    calls: dict[str, int],
    part: int,
    victim: str,
) -> None:
    """`part`: of all calls of the registry and the database, before one of which it happens. MLflow
    and PostgreSQL are away then, until the promotion or the look that made the call has ended."""
    promoter, replica, two = killed
    is_promotion = victim == "promoter" or (victim != "service" and part % 2 == 1)
    one, number = promoter if is_promotion else replica, None
    if is_promotion:
        order: dict[str, Any] = {"promote": next(SEEDS)}
    else:
        number, order = ci.ask(seed=next(SEEDS), model=KILLED)["version"], {}
    at = part * calls["promotion" if is_promotion else "look"] // PARTS
    order["at"] = at
    if victim in ("promoter", "service"):
        assert one.ask(**order, signal=signal.SIGKILL) == {"killed": True}
    else:
        hours = {"clock": 24 if part % 4 < 2 else -24}.get(victim, 0)
        # By its lease the lock is still held after the short time of a jump, and not after a stop.
        lease = {"lease_s": 15.0} if hours else {}
        assert one.ask(**order, **lease, signal=signal.SIGSTOP) == {"stopped": True}
        if victim == "mlflow":
            world.server.kill()
        elif victim == "postgresql":
            world.database.stop()
        elif victim == "clock":
            _let_clock_jump(world.database.url, hours)
            two.ask()
        else:
            two.ask()
        one.ask(**{"continue": True})
        if victim == "mlflow":
            world.server.start()
        elif victim == "postgresql":
            world.database.start()
    assert two.ask(lease_s=15.0)["failed"] == []
    champion = world.champion(KILLED)
    moves = [e for e in world.entries(KILLED) if e.operation and e.action != "conflict"]
    assert champion == moves[-1].version
    assert world.pending() == ""
    assert number is None or champion == number
    assert world.live(two.host, KILLED) == champion
    assert two.ask()["done"] == 0
    moved = Counter(e.version for e in moves)
    assert set(moved.values()) == {1}, moved


def test_ci_on_its_host_hands_in_and_replicas_on_two_others_deploy(
    world: World, services: list[Service]
) -> None:
    for name, documented_name in FILES.items():
        shutil.copy(small_project.made() / name, world.ci.folder / documented_name)
        (world.ci.folder / documented_name).chmod(0o644)
    policy = (world.replicas[0].folder / "policy.yaml").read_text()
    world.ci.write("policy.yaml", policy)
    environment = world.as_ci() | {
        "MLFLOW_TRACKING_URI": world.server.uri, "GATE_SIGNING_KEY": "ci.pem",
        "GATE_TRUST": "ci-trust.yaml",
    }  # fmt: skip
    for command in documented("CI")[1:]:  # the service has to trust the key already
        words, _, target = " ".join(command).partition(" > ")
        done = world.ci.run("-m", *words.split(), **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        if target:
            world.ci.write(target, done.stdout)
    assert "handed in" in done.stdout
    assert not (world.ci.folder / ".gate" / "state.db").exists()  # it has no ledger
    wait_until_all_serve(world, "1", *services)


def test_who_is_on_one_host_can_t_look_into_another(world: World) -> None:
    why = why_one_user()
    if why is not None:
        pytest.skip(why)
    one = world.replicas[0]
    for host, other in ((world.ci, one), (one, world.ci), (one, world.replicas[1])):
        look = f"import os; os.listdir({str(other.folder)!r})"
        assert "PermissionError" in host.run("-c", look).stderr


def test_postgresql_is_restarted_while_something_is_handed_in(
    world: World, ci: Program, services: list[Service]
) -> None:
    ci.order(seed=next(SEEDS), model="digits")
    world.database.restart()
    number = ci.answer()["version"]
    world.database.restart()
    wait_until_all_serve(world, number, *services)


def test_what_a_stranger_signed_is_refused_and_what_is_right_serves_afterwards(
    world: World, ci: Program, services: list[Service], tmp_path: Path
) -> None:
    """With CI's password, and a key that nobody trusts."""
    SigningKey.make(tmp_path / "stranger.pem")
    world.ci.write("stranger.pem", (tmp_path / "stranger.pem").read_text())
    world.ci.write("stranger.pub", (tmp_path / "stranger.pub").read_text())
    stranger = Program(
        world.ci, "-m", "tests.end_to_end.ci", world.server.uri, "stranger.pem",
        environment=world.as_ci(),
    )  # fmt: skip
    forged = stranger.ask(seed=next(SEEDS), model="digits")["version"]
    stranger.end()
    registry, before = MlflowRegistry(world.server.uri), [each.serves for each in services]
    refused = "Status: handed in, and refused: "
    assert until(lambda: registry.version("digits", forged).description.startswith(refused), WAIT_S)
    assert "is signed by 0 of the keys" in registry.version("digits", forged).tags[Tag.REFUSED]
    assert [each.serves for each in services] == before
    number = ci.ask(seed=next(SEEDS), model="digits")["version"]
    wait_until_all_serve(world, number, *services)
    lines = [(e.action, e.version) for e in world.entries("digits") if e.version == forged]
    assert lines == [("refused", forged)]


@exhaustive
def test_killed_while_the_other_goes_on_and_each_line_is_there_once(
    world: World, ci: Program, services: list[Service]
) -> None:
    one, two = services
    number = ci.ask(seed=next(SEEDS), model="digits")["version"]
    one.end(signal.SIGKILL)
    wait_until_all_serve(world, number, two)
    one.start()
    wait_until_all_serve(world, number, one, two)
    for each in services:
        each.end()
    check_each_line_once(world, "digits")


def check_each_line_once(world: World, model: str) -> None:
    """Each version was promoted once, and deployed by each replica at most once."""
    entries = [e for e in world.entries(model) if e.action != "refused"]
    assert {e.action for e in entries} == {"promoted", "deployed"}
    written = Counter((e.action, e.version, e.actor) for e in entries)
    assert set(written.values()) == {1}, written
    moved = Counter(e.version for e in entries if e.action == "promoted")
    assert set(moved.values()) == {1}, moved
