"""Everything that an editor can spoil, spoiled at once before the real service: it goes on.

Each model has a version that nobody passed, which `champion` is pointed at as soon as something
else of the model is spoiled. One model more is spared: for it everything works as ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.errors import GateError
from gate.mlflow_client.connection import lent
from gate.registry.release import GoldenFolder, Release
from tests import builders, plain_http
from tests.end_to_end import spoils
from tests.end_to_end.spoils import DAMAGED_STORE, Victim
from tests.end_to_end.stack import Stack, mlflow_server, stack, until
from tests.exhaustive import some
from tests.golden_vectors import vectors
from tests.registry.promoting import promote
from tests.registry.releases import evidence, onnx_file, release
from tests.registry.servers import make_run
from tests.registry.test_preprocessing_beside import made

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(1800)]
SPOILS = some(spoils.SPOILS, 25)
POLICY = builders.policy()
SPARED = "spared"
SETTLED_S = 600.0
"""For fifty deployments, each with processes of its own, on a machine that does more than that."""
MEMORY_KB = 600 * 1024


@dataclass
class Pulse:
    """How the service does while all of it goes on."""

    slowest_s: float = 0.0
    answers: int = 0
    peak_kb: int = 0


@contextlib.contextmanager
def watching(whole: Stack) -> Iterator[Pulse]:
    over, pulse = threading.Event(), Pulse()

    def watch() -> None:
        while not over.wait(0.05):
            begun = time.monotonic()
            plain_http.get(f"{whole.address}/healthz", timeout=30).raise_for_status()
            pulse.slowest_s = max(pulse.slowest_s, time.monotonic() - begun)
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
    with mlflow_server(folder / "mlflow") as server, lent(server.uri):
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
    assert aftermath.pulse.slowest_s < 30.0
    assert aftermath.pulse.peak_kb < MEMORY_KB


def test_nothing_that_is_whole_was_condemned(aftermath: Aftermath) -> None:
    lines = [e for e in aftermath.spared.ledger.entries() if e.model == SPARED]
    # Version 3 is the one that nobody vouches for.
    assert {e.previous_version for e in lines if e.action == "reverted"} == {"3"}
    assert aftermath.spared.serves() == "2"
