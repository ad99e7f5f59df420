"""The corpus is complete, its faults are real, its runner can fail, and the gate judges a part of
it."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from benchmarks.corpus.__main__ import main
from benchmarks.corpus.architecture import ARCHITECTURES
from benchmarks.corpus.bench import SAMPLES, Bench, Pair
from benchmarks.corpus.correct import CORRECT_PAIRS, RECIPES
from benchmarks.corpus.entry import FAULTS, Entry
from benchmarks.corpus.exporters import Recipe
from benchmarks.corpus.outcome import Outcome, Rates, Ruling
from benchmarks.corpus.registry import ENTRIES
from benchmarks.corpus.run import run
from benchmarks.corpus.trained import build_trained, to_tensors
from tests.exhaustive import EXHAUSTIVE, exhaustive, further_as_proofs, select_rows

# the whole part is judged in one fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

UNREADABLE_KINDS = {
    "truncated file",
    "no model",
    "swapped external data",
    "stale digest",
    "input dtype",
}
"""Kinds of faults of which some files are rejected while they are read."""
READING_ERRORS = {"OnnxFileError", "InputMismatch", "DigestMismatch"}


SLOW_ARCHITECTURES = {
    "resnet",
    "mobilenet",
    "segmenter",
    "recurrent",
    "denoiser",
    "stylist",
    "texture",
}
"""Architectures that take longer than a second."""


STRIDE = 9
"""`make check` judges every N-th kind of faults and every N-th correct pair."""
MIN_FAULTS = 60 if EXHAUSTIVE else 7
"""Minimum number of judged faults: one of each selected kind."""


def _select_entries() -> list[Entry]:
    """Return the fastest fault of each kind and some correct pairs.

    Each architecture has one exporter, the fast ones two, and one file is from dynamo. resnet18 is
    omitted because it takes as long as ten others; the tests of the ladder cover it.
    """
    faults: dict[str, Entry] = {}
    for fault in FAULTS:
        if _slowness(fault) < _slowness(faults.setdefault(fault.kind, fault)):
            faults[fault.kind] = fault
    correct = {item.name: item for item in CORRECT_PAIRS if _is_drawn(item)}
    return [*select_rows(correct, STRIDE).values(), *select_rows(faults, STRIDE).values()]


def _slowness(fault: Entry) -> tuple[bool, bool]:
    """Return a sort key; dynamo exports take seconds."""
    dynamo = fault.recipe.exporter.startswith("dynamo")
    return (
        dynamo or fault.architecture.name == "resnet18",
        fault.architecture.name in SLOW_ARCHITECTURES,
    )


def _is_drawn(correct: Entry) -> bool:
    if correct.architecture.name == "resnet18":
        return False
    if correct.recipe == Recipe("scripted", 17):
        return correct.architecture.name not in SLOW_ARCHITECTURES
    return correct.recipe == Recipe("direct", 17) or (
        (correct.title, correct.recipe) == ("tokens", Recipe("dynamo", 18))
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return run(_select_entries())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert len(FAULTS) >= 60
    assert len({fault.kind for fault in FAULTS}) >= 20
    assert len(ARCHITECTURES) >= 8
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert all(len(entry.summary) > 20 and entry.summary.endswith(".") for entry in ENTRIES)
    assert sum(fault.layer is not None for fault in FAULTS) >= 60
    exporters = {recipe.exporter for recipe in RECIPES}
    assert {fault.recipe.exporter for fault in FAULTS} == exporters
    assert {fault.architecture.name for fault in FAULTS} >= set(ARCHITECTURES)


@pytest.mark.parametrize("name", further_as_proofs(ARCHITECTURES, 5))
def test_references_tell_samples_apart_and_are_the_same_every_time(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, retrained = build_trained(architecture), build_trained(architecture)
    assert not model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, retrained.state_dict()[key]), key
    samples = architecture.draw(SAMPLES, 0)
    for key, array in architecture.draw(SAMPLES, 0).items():
        assert np.array_equal(array, samples[key])
    with torch.no_grad():
        returned = model(*to_tensors(samples, 0, SAMPLES))
    first = returned if isinstance(returned, torch.Tensor) else returned[0]
    assert len(first.argmax(1).unique()) >= 3
    assert 0.5 < float(first.std()) < 5.0


def test_layers_are_modules_of_their_architecture() -> None:
    layered = [fault for fault in FAULTS if fault.layer]
    architectures = {fault.architecture.name: fault.architecture for fault in layered}
    modules = {
        name: dict(created.make().named_modules()) for name, created in architectures.items()
    }
    missing = [f.name for f in layered if f.layer not in modules[f.architecture.name]]
    assert missing == []


@pytest.mark.proof
def test_no_fault_passes(outcomes: list[Outcome]) -> None:
    assert [item.name for item in outcomes if item.escaped] == []
    rates = Rates.from_outcomes(outcomes)
    assert rates.faults >= MIN_FAULTS
    assert rates.lost == 0


@pytest.mark.proof
def test_no_correct_file_is_refused(outcomes: list[Outcome]) -> None:
    refused = {
        item.name: item.ruling.explanation for item in outcomes if item.blocked and item.ruling
    }
    assert refused == {}
    assert Rates.from_outcomes(outcomes).correct >= MIN_FAULTS // 4


@pytest.mark.proof
def test_the_right_layer_is_named(outcomes: list[Outcome]) -> None:
    missed = {
        item.name: item.ruling.located
        for item in outcomes
        if item.located_right is False and item.ruling
    }
    assert missed == {}
    assert Rates.from_outcomes(outcomes).layers >= MIN_FAULTS // 4


@pytest.mark.proof
def test_faults_are_no_mere_broken_files(outcomes: list[Outcome]) -> None:
    """A graph edited into an invalid one would be detected for the wrong reason."""
    for item in outcomes:
        if item.faulty and item.kind not in UNREADABLE_KINDS:
            assert item.ruling is not None
            assert not READING_ERRORS & set(item.ruling.failed_checks), (
                item.name,
                item.ruling.explanation,
            )


@pytest.mark.proof
def test_faults_in_a_model_change_what_it_computes(outcomes: list[Outcome]) -> None:
    """Compare the two PyTorch models in float64, without ONNX or the gate. Faults without an effect
    on the samples are listed here: only other inputs can show them."""
    unseen = {
        item.name.split("/")[2]
        for item in outcomes
        if item.effect is not None and item.effect < 1.0
    }
    assert unseen <= {"divided-by-zero-standardised", "logarithm-of-zero-logarithmic",
                      "softmax-without-maximum-sharp"}  # fmt: skip
    assert sum(item.effect is not None for item in outcomes) >= MIN_FAULTS // 4


@pytest.mark.proof
def test_agreement_of_classes_alone_lets_many_faults_pass(outcomes: list[Outcome]) -> None:
    assert Rates.from_outcomes(outcomes).top1_passes >= MIN_FAULTS // 4


def _create_judge(passed: bool) -> Callable[[Pair], Ruling]:
    return lambda pair: Ruling(passed, () if passed else ("planted",))


@pytest.mark.parametrize(
    ("only", "passed", "code"),
    [
        ("fault/sign/all-negated-*", True, 1),
        ("fault/sign/all-negated-*", False, 1),
        ("fault/another-model/*", False, 0),
        ("correct/pooling/direct-13", True, 0),
        ("correct/pooling/direct-13", False, 1),
        ("correct/vit/traced-13", True, 1),
        ("nothing/*", True, 2),
    ],
    ids=[
        "escape",
        "no layer named",
        "caught",
        "right",
        "false block",
        "nothing exported",
        "no entry",
    ],
)
def test_the_runner_itself_can_fail(
    only: str, passed: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--only", only], gate=_create_judge(passed)) == code
    capsys.readouterr()


@pytest.mark.proof
def test_the_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "outcomes.json"
    arguments = ["--only", "*points/direct-1[37]", "--json", str(file), "--distribution"]
    assert main(arguments) == 0
    record = json.loads(file.read_text())
    by_name = {item["name"]: item for item in record["outcomes"]}
    fault = by_name["fault/duplicate-indices/points/direct-13"]
    assert not fault["ruling"]["passed"]
    assert "noise_ratio" in fault["ruling"]["failed_checks"]
    assert fault["ruling"]["numbers"]["noise_ratio"] > 1e3
    assert by_name["correct/points/direct-17"]["ruling"]["passed"]
    printed = capsys.readouterr().out
    faults = sum(item["faulty"] for item in record["outcomes"])
    assert faults >= 1
    assert f"Escaped: 0 of {faults} faulty files" in printed
    assert "noise_ratio, faulty beyond: " in printed


@pytest.mark.parametrize(
    ("wrong", "green"),
    [
        ({}, True),
        ({"escaped": 1}, False),
        ({"blocked": 1}, False),
        ({"located": 4}, False),
        ({"lost": 1}, False),
        ({"faults": 0, "correct": 0}, False),
    ],
)
def test_rates_are_green_only_if_nothing_is_wrong(wrong: dict[str, int], green: bool) -> None:
    counts = {"faults": 9, "escaped": 0, "correct": 9, "blocked": 0, "refused": 1, "lost": 0,
              "top1_passes": 4, "layers": 5, "located": 5} | wrong  # fmt: skip
    assert Rates(**counts).green is green


@exhaustive
@pytest.mark.proof
def test_edited_graphs_are_valid(bench: Bench) -> None:
    """Check the graphs with onnx's checker, also those of dynamo exports."""
    edited = [f for f in FAULTS if f.kind in {"output order", "extra output", "random"}]
    for fault in edited:
        folder = bench.folder / "one"
        folder.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair = fault.make(bench, folder / "model.onnx")
        onnx.checker.check_model(str(pair.path))
        shutil.rmtree(folder)
