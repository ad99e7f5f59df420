"""kill -9 at every step that lasts: afterwards the state is right, and every line is there once.

The steps are counted by a run that is not killed: each write that becomes durable, each change of
the registry, each line of the ledger. Then a process of its own is killed before each of them, or
before those that `chosen` picks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gate.ledger.entry import plain
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.eligibility import TrustFile
from gate.registry.interface import CHAMPION, Tag
from gate.signing.keys import SigningKey
from tests.exhaustive import EXHAUSTIVE, exhaustive
from tests.registry.kept_folder import KeptFolder
from tests.registry.promoting import submit
from tests.registry.signed import Signing, save, trust_in
from tests.service.places import AUTOMATIC, Model

pytestmark = [
    pytest.mark.slow,
    # Of fork, in a process with threads of MLflow's database: the child only goes on, or dies.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LASTING = (
    (os, "replace"), (os, "rename"), (os, "symlink"), (os, "fsync"),
    (MlflowRegistry, "set_alias"), (MlflowRegistry, "delete_alias"), (MlflowRegistry, "set_tag"),
    (MlflowRegistry, "set_description"), (Ledger, "append"),
)  # fmt: skip


def approval(model: Model) -> None:
    """Version 1 serves, version 2 was approved."""
    model.approve(model.hand_in(1))
    model.look()
    model.approve(model.hand_in(2))


def offence(model: Model) -> None:
    """Versions 1 and 2 served; somebody points champion at 3, which was not approved."""
    for seed in (1, 2):
        model.approve(model.hand_in(seed))
        model.look()
    model.registry.set_alias(model.name, CHAMPION, model.hand_in(3))


def rejection(model: Model) -> None:
    """Version 1 serves, version 2 is the candidate and was rejected."""
    model.approve(model.hand_in(1))
    model.look()
    model.registry.set_tag(model.name, model.hand_in(2), key=Tag.REVIEW, value="REJECTED")


def handing_in(model: Model) -> None:
    """Version 1 serves, version 2 was handed in without the ledger."""
    hand_over(model, trusting(model))


def forgery(model: Model) -> None:
    """The same, and the key of version 2 is nobody's."""
    trusting(model)
    hand_over(model, SigningKey.make(model.place.folder / "stranger.pem"))


def trusting(model: Model) -> SigningKey:
    """Version 1 serves, nothing is reviewed, and one key is trusted."""
    folder = model.place.folder
    model.policy = model.place.policy = AUTOMATIC
    model.hand_in(1)
    model.look()
    key = SigningKey.make(folder / "ci.pem")
    model.trust = TrustFile(save(trust_in(key), folder / "trust.yaml"))
    return key


def hand_over(model: Model, key: SigningKey) -> None:
    of = replace(model.place.release(2), model_name=model.name, run_id=model.run_id)
    signing = Signing(key, registry=plain(model.registry.identity), model=model.name)
    done = submit(model.registry, signing.signed(of, AUTOMATIC), policy=AUTOMATIC)
    assert done.outcome == "handed_in"


@contextmanager
def counted(kill_at: int | None) -> Iterator[list[str]]:
    """Keep the names of the lasting steps; before the one of that number this process is killed."""
    steps: list[str] = []
    kept = [(owner, name, getattr(owner, name)) for owner, name in LASTING]

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            if len(steps) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            steps.append(name)
            return call(*arguments, **options)

        return step

    for owner, name, call in kept:
        setattr(owner, name, wrapped(name, call))
    try:
        yield steps
    finally:
        for owner, name, call in kept:
            setattr(owner, name, call)


def killed(model: Model, at: int) -> bool:
    """Look in a process that is killed before that step; False if there was no such step."""
    child = os.fork()
    if child == 0:
        with counted(at):
            try:
                MlflowRegistry(model.registry._uri)
                model.registry = MlflowRegistry(model.registry._uri)
                model.look()
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed; see above"
    return os.WIFSIGNALED(status)


STEPS = {
    approval: {"fsync", "set_alias", "rename", "symlink", "set_tag"},
    offence: {"set_alias", "set_tag"},
    rejection: {"delete_alias", "set_tag"},
    handing_in: {"fsync", "set_alias", "rename", "symlink"},
    forgery: {"set_tag"},
}
"""That a scenario is about, among others."""


def chosen(steps: list[str]) -> list[int]:
    """All steps of `make exhaustive`; else the first of each kind, the last, and every fifth."""
    every = 1 if EXHAUSTIVE else 5
    return sorted({*map(steps.index, steps), *range(0, len(steps), every), len(steps) - 1})


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has threads")
@pytest.mark.proof
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(approval, marks=exhaustive),
        pytest.param(offence, marks=exhaustive),
        pytest.param(rejection, marks=exhaustive),
        pytest.param(handing_in, marks=exhaustive),
        forgery,
    ],
)
def test_killed_at_every_step(scenario: Callable[[Model], None], tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    model = Model(tmp_path, f"sqlite:///{database}", "digits")
    scenario(model)
    beginning, before = KeptFolder(model.place.folder, database), model.state()
    with counted(None) as steps:
        assert model.look() > 0
    wanted = model.state()
    assert wanted != before
    assert {"append", "set_description"} <= set(steps)
    assert STEPS[scenario] <= set(steps)
    for at in chosen(steps):
        beginning.again()
        assert model.state() == before
        assert killed(model, at), (at, steps[at])
        model.look()
        assert model.state() == wanted, (at, steps[at])
        assert model.look() == 0
        assert model.state() == wanted, (at, steps[at])
