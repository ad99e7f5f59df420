"""The second corpus has the documented size, its faults are real, and its command judges files."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.effect import compute_outputs, measure_effect
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.outcome import Ruling
from benchmarks.corpus.trained import build_trained
from benchmarks.world.__main__ import main
from benchmarks.world.fault import ARCHITECTURES, FAULTS
from benchmarks.world.registry import ENTRIES, REFUSED, half_of, select_entries

MIN_EFFECT = 5.0
"""In units of rounding error. The mildest fault of the first corpus has an effect of 2.4."""


def test_the_corpus_has_the_documented_size() -> None:
    assert len(ARCHITECTURES) >= 60
    assert len(FAULTS) >= 120
    assert len({fault.kind for fault in FAULTS}) >= 30
    assert sum(fault.layer is not None for fault in FAULTS) >= 50
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert all(len(entry.summary) > 20 and entry.summary.endswith(".") for entry in ENTRIES)
    assert {name.partition("-")[0] for name in ARCHITECTURES} == {"timm", "hf"}
    assert set(REFUSED) <= set(ARCHITECTURES)
    assert sum(not entry.faulty for entry in ENTRIES) == 2 * len(ARCHITECTURES) - len(REFUSED)


def test_localized_faults_name_a_module_of_their_model() -> None:
    layered = [fault for fault in FAULTS if fault.layer]
    assert not any(fault.reach for fault in layered)
    assert len({fault.architecture.name for fault in layered}) >= 15
    for fault in layered:
        assert fault.layer in dict(fault.architecture.make().named_modules()), fault.name


def test_halves_are_split_by_architecture_and_both_large() -> None:
    halves = {half: select_entries(None, half) for half in ("tune", "confirm")}
    assert sum(map(len, halves.values())) == len(ENTRIES)
    names = [{entry.architecture.name for entry in half} for half in halves.values()]
    assert names[0].isdisjoint(names[1])
    for half in halves.values():
        assert sum(entry.faulty for entry in half) >= 60
        assert len({entry.architecture.name for entry in half}) >= 30
    assert {half_of(name) for name in ("hf-bert", "hf-gpt2", "timm-mixer")} == {"tune", "confirm"}


@pytest.mark.rows(5)
@pytest.mark.parametrize("fault", FAULTS[::8], ids=lambda f: f.name)
def test_faults_show_in_the_samples_or_within_their_reach(fault: Entry, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    freevars = dict(zip(fault.make.__code__.co_freevars, fault.make.__closure__, strict=True))
    with torch.no_grad():
        model = bench.model(fault.architecture)
        copied = copy.deepcopy(model)
        edited = freevars["edit"].cell_contents(copied, fault.architecture) or copied
    inputs = fault.reach() if fault.reach else bench.samples(fault.architecture)
    assert measure_effect(edited, model, inputs) > MIN_EFFECT


@pytest.mark.parametrize("name", ["hf-bert", "hf-wav2vec2", "timm-mixer"])
def test_references_are_the_same_every_time_and_answers_vary(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, retrained = build_trained(architecture), build_trained(architecture)
    for key, value in model.state_dict().items():
        assert torch.equal(value, retrained.state_dict()[key]), key
    (answers, *_) = compute_outputs(model, architecture.draw(architecture.count or 24, 0))
    assert np.all(answers.std(axis=0) > 0)


def test_an_effect_is_that_of_the_worst_column() -> None:
    class Scaled(nn.Module):
        def __init__(self, small: float) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            nn.init.constant_(self.linear.weight, 0.3)
            nn.init.constant_(self.linear.bias, 0.1)
            self.register_buffer("scale", torch.tensor([1e6, small]))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.linear(rows) * self.scale

    rows = {"rows": np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)}
    assert measure_effect(Scaled(1.0), Scaled(1.0), rows) == 0.0
    assert 10.0 < measure_effect(Scaled(1.001), Scaled(1.0), rows) < math.inf


def _pass_existing(pair: Pair) -> Ruling:
    assert pair.path.is_file()
    return Ruling(True)


def test_the_command_fails_where_a_fault_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "world.json"
    only = "fault/one-weight/*-timm-mixer-*"
    assert main(["--only", only, "--json", str(file)], gate=_pass_existing) == 1
    (outcome,) = json.loads(file.read_text())["outcomes"]
    assert outcome["ruling"]["passed"]
    assert outcome["effect"] > MIN_EFFECT
    assert "escaped" in capsys.readouterr().out
    assert main(["--only", "fault/nothing/*"], gate=_pass_existing) == 2


@pytest.mark.parametrize(
    "only",
    [
        "correct/timm-vit-tiny-patch16-224/direct-17",
        pytest.param("fault/one-weight/*-timm-mixer-*", marks=pytest.mark.proof),
        pytest.param("fault/towers-swapped/*-hf-siglip/*", marks=pytest.mark.proof),
    ],
)
def test_the_gate_is_right_about_some(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", only]) == 0, capsys.readouterr().out
