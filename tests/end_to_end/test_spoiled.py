"""Everything that an editor can spoil, spoiled at once before the real service: it goes on.

Each model has a version that nobody passed, which `champion` is pointed at as soon as something
else of the model is spoiled. One model more is spared: for it everything works as ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.errors import GateError
from gate.mlflow_client.connection import using_tracking_uri
from gate.records.layout import PREPROCESSING, SPEC
from gate.registry.interface import CHAMPION, PREVIOUS, Tag
from gate.registry.release import GoldenFolder, Release
from tests import builders, plain_http
from tests.end_to_end.stack import Stack, mlflow_server, stack, until
from tests.exhaustive import some
from tests.golden_vectors import vectors
from tests.golden_vectors.test_pictures import EPS
from tests.ledger.rows import put_pending
from tests.registry.promoting import promote
from tests.registry.releases import evidence, onnx_file, release
from tests.registry.servers import make_run
from tests.registry.test_preprocessing_beside import made
from tests.storage.test_foreign import DEEP, YAML_BOMB

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(1800)]
SPEC_JSON, GOLDEN_JSON, MODEL = f"{PREPROCESSING}/{SPEC}", "golden/golden.json", "model.onnx"
GIB = 1 << 30


@dataclass(frozen=True)
class Victim:
    """A model whose version 1 serves, and whose version 2 nobody ever passed."""

    stack: Stack
    client: MlflowClient
    number: int

    @property
    def name(self) -> str:
        return self.stack.model

    @property
    def artifacts(self) -> Path:
        """Where the files of version 1 lie."""
        source = self.client.get_model_version(self.name, "1").source or ""
        (folder,) = self.stack.server.artifacts.rglob(source.rpartition("/")[2])
        return folder / "artifacts"


Spoil = Callable[[Victim], object]
"""What it gives, if that is a text, is the number of the version that `champion` is pointed at."""


def _written(name: str, data: bytes) -> Spoil:
    def spoil(victim: Victim) -> None:
        path = victim.artifacts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return spoil


def _sparse(name: str, size: int) -> Spoil:
    def spoil(victim: Victim) -> None:
        path = victim.artifacts / name
        path.touch()  # without taking room
        os.truncate(path, size)

    return spoil


def _folder(name: str) -> Spoil:
    def spoil(victim: Victim) -> None:
        (victim.artifacts / name).unlink()
        (victim.artifacts / name / "in").mkdir(parents=True)
        (victim.artifacts / name / "in" / "file").touch()

    return spoil


def _many(victim: Victim) -> None:
    (victim.artifacts / "many").mkdir()
    for number in range(300):
        (victim.artifacts / "many" / str(number)).touch()


def _deep(victim: Victim) -> None:
    (victim.artifacts / "/".join(["d"] * 100)).mkdir(parents=True)
    (victim.artifacts / "/".join(["d"] * 100) / "file").touch()


def _golden_array(victim: Victim) -> None:
    (first, *_) = sorted((victim.artifacts / "golden").rglob("*.bin"))
    os.truncate(first, 15 * GIB)


def _tag(key: str, value: str) -> Spoil:
    return lambda v: v.client.set_model_version_tag(v.name, "1", key, value)


def _many_tags(victim: Victim) -> None:
    for number in range(50):
        victim.client.set_model_version_tag(victim.name, "1", f"t{number}", "x" * 4000)
        victim.client.set_registered_model_tag(victim.name, f"t{number}", "x" * 4000)


def _untagged(victim: Victim) -> None:
    for key in victim.client.get_model_version(victim.name, "1").tags:
        victim.client.delete_model_version_tag(victim.name, "1", key)


def _source(uri: str) -> Spoil:
    """A version whose files are elsewhere, which `champion` will point at."""

    def spoil(victim: Victim) -> str:
        return str(victim.client.create_model_version(victim.name, uri).version)

    return spoil


def _renamed(victim: Victim) -> None:
    victim.client.rename_registered_model(victim.name, f"{victim.name} elsewhere")


def _pending(text: str) -> Spoil:
    def spoil(victim: Victim) -> None:
        put_pending(victim.stack.ledger.state, text)

    return spoil


def _manifest(victim: Victim) -> None:
    link = victim.stack.store.live_link(victim.name)
    (link / "manifest.json").write_bytes(DEEP)


def _live_link(victim: Victim) -> None:
    link = victim.stack.store.live_link(victim.name)
    link.unlink()
    link.symlink_to("/etc")


SPOILS: dict[str, Spoil] = some({
    # the spec of preprocessing
    "bomb for a spec": _written(SPEC_JSON, YAML_BOMB),
    "endless spec": _sparse(SPEC_JSON, 4 * GIB),
    # golden vectors
    "endless golden array": _golden_array,
    "program for a golden picture": _written("golden/pictures/0.png", EPS),
    # records
    "endless decision": _sparse("gate/decision.json", 4 * GIB),
    # MLflow's own record, and the model
    "MLmodel that leads out": _written("MLmodel", b"flavors: {onnx: {data: ../../../../etc/passwd}, python_function: {data: ../../../../etc/passwd, loader_module: mlflow.onnx}}"),
    "nodes without end": _written(MODEL, b":\x02\n\0" * (5 << 20)),
    # what is put beside them
    "hundreds of files": _many,
    "hundred folders deep": _deep,
    "endless file": _sparse("data", 40 * GIB),
    # tags, aliases, names
    "tag of a revert": _tag(Tag.REVERTED, "\x1b[2J\n" * 500),
    "review in control characters": _tag(Tag.REVIEW, "\x1b]0;approved\x07\n\u202e"),
    "hundred large tags": _many_tags,
    "no tags": _untagged,
    "description without end": lambda v: v.client.update_model_version(v.name, "1", "# x\n" * 20_000),
    "alias that leads nowhere": lambda v: v.client.set_registered_model_alias(v.name, PREVIOUS, "2"),
    "no alias": lambda v: v.client.delete_registered_model_alias(v.name, CHAMPION),
    "renamed model": _renamed,
    "deleted model": lambda v: v.client.delete_registered_model(v.name),
    "deleted version": lambda v: v.client.delete_model_version(v.name, "1"),
    # where a version says that its files are
    "files of another version": _source("models:/spared/1"),
    "files of a store of somebody's": _source("s3://nobodys/models"),
    "files of no kind": _source("gopher://127.0.0.1/0"),
    # mishaps of the service's own files
    "a long pending move": _pending(DEEP.decode()),
    "nested manifest": _manifest,
    "link out of the store": _live_link,
}, 13)  # fmt: skip
DAMAGED_STORE = ("nested manifest", "link out of the store")

POLICY = builders.policy()
SPARED = "spared"
SETTLED_S = 600.0
"""For fifty deployments, each with processes of its own, on a machine that does more than that."""
MEMORY_KB = 600 * 1024


@dataclass
class Pulse:
    """How the service does while all of it goes on."""

    answers: int = 0
    peak_kb: int = 0


@contextlib.contextmanager
def watching(whole: Stack) -> Iterator[Pulse]:
    over, pulse = threading.Event(), Pulse()

    def watch() -> None:
        while not over.wait(0.05):
            plain_http.get(f"{whole.address}/healthz", timeout=30).raise_for_status()
            pulse.answers += 1

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield pulse
    finally:
        over.set()
        thread.join()
        assert whole.service is not None
        status = Path(f"/proc/{whole.service.pid}/status").read_text().splitlines()
        pulse.peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def golden_release(folder: Path, seed: int) -> Release:
    path = onnx_file(folder / "model.onnx", seed=seed)
    origin = vectors.origin().model_copy(update={"policy_sha256": POLICY.digest()})
    vectors.golden_of(folder / "golden", path, origin=origin)
    golden = GoldenFolder.open(folder / "golden")
    return release(path, evidence=evidence(path), policy=POLICY, golden=golden)


def hand_in(whole: Stack, of: Release) -> str:
    made = promote(
        whole.registry, dataclasses.replace(of, model_name=whole.model), policy=POLICY,
        ledger=whole.ledger,
    )  # fmt: skip
    assert made.version is not None, made.reason
    return made.version


def unvouched(client: MlflowClient, name: str) -> str:
    """A version that somebody made of the files of version 1, without the gate."""
    source = str(client.get_model_version(name, "1").source)
    made = client.create_model_version(name, source, model_id=source.rpartition("/")[2])
    return str(made.version)


@dataclass
class Aftermath:
    victims: dict[str, Victim]
    forged: dict[str, str]
    """By model: the version that `champion` was pointed at."""
    spared: Stack
    pulse: Pulse
    wanted: str
    """The digest of the bytes that each model served before."""


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aftermath]:
    folder = tmp_path_factory.mktemp("spoiled")
    (folder / "mlflow").mkdir()
    with mlflow_server(folder / "mlflow") as server, using_tracking_uri(server.uri):
        client = MlflowClient(server.uri, server.uri)
        run_id = make_run(server.uri)
        golden = dataclasses.replace(golden_release(folder / "golden", 1), run_id=run_id)
        newer = dataclasses.replace(golden_release(folder / "newer", 2), run_id=run_id)
        spec = dataclasses.replace(made(folder, seed=1), run_id=run_id)
        with stack(folder, server, SPARED, policy=POLICY) as spared:
            victims = {}
            for number, title in enumerate(SPOILS):
                one = dataclasses.replace(spared, model=f"victim-{number}")
                hand_in(one, spec if "spec" in title else golden)
                victims[title] = Victim(one, client, number)
                unvouched(client, one.model)
            hand_in(spared, golden)
            spared.stop()
            spared.unregister()
            names = [victim.name for victim in victims.values()]
            spared.launch(*(option for name in names for option in ("--model", name)))
            spared.register()
            for victim in victims.values():
                victim.stack.address = spared.address
            assert until(lambda: all(v.stack.deployed() for v in victims.values()), SETTLED_S)
            with watching(spared) as pulse:
                forged = {title: spoiled(title, victim) for title, victim in victims.items()}
                number = hand_in(spared, newer)
                assert until(lambda: spared.deployed() == spared.digest(number), SETTLED_S)
                spared.point(unvouched(client, SPARED))
                assert until(lambda: spared.serves() == number, SETTLED_S)
                until(lambda: all(settled(v, forged[t]) for t, v in victims.items()), SETTLED_S)
            yield Aftermath(victims, forged, spared, pulse, golden.decision.subject_sha256.hex)


def spoiled(title: str, victim: Victim) -> str:
    """Spoil something, and point `champion` at what nobody passed; gives its number."""
    number = SPOILS[title](victim)
    forged = number if isinstance(number, str) else "2"
    with contextlib.suppress(GateError):  # there may be no such model any more
        victim.stack.point(forged)
    return forged


def settled(victim: Victim, forged: str) -> bool:
    return victim.stack.serves() != forged


@pytest.mark.parametrize("title", SPOILS)
def test_what_nobody_passed_does_not_serve(aftermath: Aftermath, title: str) -> None:
    victim = aftermath.victims[title]
    assert settled(victim, aftermath.forged[title])
    # A person has to put right what is damaged in the store; until then nothing comes from there.
    allowed = (None,) if title in DAMAGED_STORE else (victim.stack.digest("1"),)
    assert victim.stack.deployed() in allowed


def test_the_service_answered_at_once_and_took_little_memory(aftermath: Aftermath) -> None:
    assert len(aftermath.victims) == len(SPOILS)
    assert aftermath.pulse.answers > 20
    assert aftermath.pulse.peak_kb < MEMORY_KB


def test_nothing_that_is_whole_was_condemned(aftermath: Aftermath) -> None:
    lines = [e for e in aftermath.spared.ledger.entries() if e.model == SPARED]
    # Version 3 is the one that nobody vouches for.
    assert {e.previous_version for e in lines if e.action == "reverted"} == {"3"}
    assert aftermath.spared.serves() == "2"
