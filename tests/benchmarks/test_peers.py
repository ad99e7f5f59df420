from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from benchmarks.corpus.judge import parity_gate
from benchmarks.corpus.registry import select_entries
from benchmarks.peers import comparator, loop, ours, race, verdicts, verification
from benchmarks.peers.__main__ import select_peers
from benchmarks.peers.case import CannotJudge, Case, Judge
from gate.export.export import export_model
from gate.records.export import ExportSettings

pytestmark = pytest.mark.further
JUDGES: dict[str, Judge] = {
    "allclose": loop.allclose,
    "top1": loop.top1,
    "polygraphy": comparator.judge,
    "verify": verification.judge,
    "ours": ours.judge,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Case:
    file = tmp_path_factory.mktemp("peers") / "model.onnx"
    samples = np.random.default_rng(0).normal(size=(16, 3, 8, 8)).astype(np.float32)
    reference = model()
    named = ExportSettings(output_names=("logits",))
    export_model(reference, {"input": samples[:4]}, settings=named, output=file)
    return Case(reference, file, {"input": samples})


Change = Callable[[onnx.ModelProto], None]


def apply_change(case: Case, spoil: Change, folder: Path) -> Case:
    proto = onnx.load(case.file)
    spoil(proto)
    file = folder / "spoilt.onnx"
    onnx.save(proto, file)
    return replace(case, file=file)


def append_operator(name: str, value: np.ndarray | float) -> Change:
    """Return a change that applies one more operator to `logits`."""

    def spoil(proto: onnx.ModelProto) -> None:
        graph = proto.graph
        graph.node[-1].output[0] = "before"
        graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), "extra"))
        graph.node.append(onnx.helper.make_node(name, ["before", "extra"], ["logits"]))

    return spoil


def add_output(proto: onnx.ModelProto) -> None:
    graph = proto.graph
    graph.node.append(onnx.helper.make_node("Identity", ["logits"], ["surplus"]))
    surplus = onnx.ValueInfoProto()
    surplus.CopyFrom(graph.output[0])
    surplus.name = "surplus"
    graph.output.append(surplus)


def passes(judge: Judge, case: Case) -> bool:
    """Return whether CI would pass; an exception is a failure."""
    try:
        return judge(case)
    except (AssertionError, ValueError):
        return False


@pytest.mark.parametrize("name", JUDGES)
def test_a_right_file_passes_everywhere(right: Case, name: str) -> None:
    assert JUDGES[name](right) is True


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("spoil", "passing"),
    [
        pytest.param(append_operator("Mul", -1.0), set(), id="negated"),
        pytest.param(append_operator("Mul", 1.001), {"top1", "allclose", "verify"}, id="0.1 % larger"),
        pytest.param(append_operator("Mul", 1.0 + 2e-6), {"top1", "allclose", "verify", "polygraphy"}, id="2e-6 larger"),
        pytest.param(append_operator("Add", [np.nan] * 5), {"verify"}, id="NaN"),
        pytest.param(add_output, {"verify", "polygraphy"}, id="one more output"),
    ],
)  # fmt: skip
def test_what_each_says_of_a_wrong_file(
    right: Case, tmp_path: Path, spoil: Change, passing: set[str]
) -> None:
    case = apply_change(right, spoil, tmp_path)
    assert {name for name, judge in JUDGES.items() if passes(judge, case)} == passing


class Branching(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.mean((2, 3)) if bool(input.max() > 0) else input.amax((2, 3))


class Images(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * 2


@pytest.mark.parametrize(
    ("judge", "made", "reason"),
    [
        (verification.judge, Branching, "torch.export"),
        (loop.top1, Images, "of classes"),
    ],
)
def test_what_a_peer_cannot_take_is_no_judgment(
    tmp_path: Path, judge: Judge, made: type[nn.Module], reason: str
) -> None:
    samples = np.random.default_rng(0).normal(size=(8, 3, 4, 4)).astype(np.float32)
    file = tmp_path / "model.onnx"
    export_model(made(), {"input": samples[:4]}, settings=ExportSettings(), output=file)
    with pytest.raises(CannotJudge, match=reason):
        judge(Case(made(), file, {"input": samples}, classes=False))


@pytest.mark.proof
def test_the_corpus_is_judged_by_all_and_counted() -> None:
    entries = select_entries("correct/resnet/traced-13") + select_entries(
        "fault/stale-digest/replaced-*"
    )
    assert [entry.faulty for entry in entries] == [False, True]
    observed: list[tuple[int, int]] = []
    results = verdicts.run(
        entries, lambda pair: parity_gate(pair).passed, advance=lambda *at: observed.append(at)
    )
    assert observed == [(1, 2), (2, 2)]
    judges = verdicts.summarize(results)["judges"]
    everything = {"faulty": 1, "escaped": 0, "correct": 1, "blocked": 0, "unjudged": 0}
    assert set(judges) == {*verdicts.PEERS, verdicts.OURS}
    assert all((item["faulty"], item["correct"]) == (1, 1) for item in judges.values())
    assert judges[verdicts.OURS] == everything
    assert all(judges[name]["escaped"] == 1 for name in verdicts.PEERS)
    assert verdicts.rates_table(results).row_count == len(judges)


def test_peers_can_be_chosen_and_then_judge_alone() -> None:
    entries = select_entries("fault/stale-digest/replaced-*")
    peers = select_peers(["loop, allclose"])
    (only,) = verdicts.run(entries, None, peers=peers)
    assert (only.judge, only.verdict) == ("loop, allclose", "passed")
    assert set(verdicts.summarize([only])["judges"]) == {"loop, allclose"}
    with pytest.raises(SystemExit, match="Polygraphy"):
        select_peers(["polygraphy"])


def test_all_that_race_do_the_job(right: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "IMAGES", 16)
    contestants = race.build_contestants(right)
    assert race.BASELINE in contestants
    seconds = race.run_round(contestants, shift=3)
    assert set(seconds) == set(contestants)
    assert next(iter(seconds)) == list(contestants)[3]
    assert all(value > 0.0 for value in seconds.values())
    assert loop.largest_difference(right, optimized=False) == ours.measure_difference(right)
