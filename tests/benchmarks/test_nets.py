"""Random small networks: a seed always gives the same network, and correct exports pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.nets.__main__ import format_rates, holds, main
from benchmarks.nets.judge import Outcome, Ruling, judge
from benchmarks.nets.net import draw
from benchmarks.nets.pair import run, run_file, write
from benchmarks.nets.proof import prove
from tests.exhaustive import further_as_proofs

PASSING = (5, 9, 10, 11, 13)


@pytest.mark.parametrize("seed", [0, 3, 14, 17, 25])
def test_a_seed_is_always_the_same_net_and_samples(seed: int) -> None:
    first = draw(seed)
    torch.rand(5)
    np.random.default_rng(3).random(5)
    second = draw(seed)

    assert first.summary == second.summary
    assert list(first.samples) == list(second.samples)
    for name, array in first.samples.items():
        np.testing.assert_array_equal(array, second.samples[name])
    for (key, value), again in zip(
        first.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(value, again), key


@pytest.mark.parametrize("seed", further_as_proofs(PASSING, 5))
def test_a_correct_net_passes(seed: int) -> None:
    outcome = judge(seed)

    assert outcome.inapplicable == ""
    assert outcome.ruling == Ruling(True)


def test_the_proof_tells_a_wrong_file_from_a_right_one(tmp_path: Path) -> None:
    drawn = draw(9)
    path = tmp_path / "model.onnx"
    write(drawn, path)
    size = drawn.batch_size
    r32, file = run(drawn.model, drawn.samples, size), run_file(path, drawn.samples, size)
    r64 = run(drawn.model, drawn.samples, size, double=True)

    assert prove(r32, file, r64).wrong == ""
    wrong = [[(a * np.float32(1.001)).astype(a.dtype) for a in batches] for batches in file]
    assert "off by 0.001" in prove(r32, wrong, r64).wrong
    ints = [[np.arange(100) + 5] for _ in range(3)]
    assert "differs" in prove(ints[:1], [[np.arange(100)]], ints[:1]).wrong


def _create_outcome(seed: int) -> Outcome:
    ruling = Ruling(seed % 2 == 0, () if seed % 2 == 0 else ("noise_ratio ort-cpu out0: 2 / 1",))
    outcome = Outcome(seed, "a net", ruling=ruling)
    if seed == 4:
        return replace(outcome, ruling=None, inapplicable="not exported")
    return outcome


def test_the_command_prints_what_was_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"

    code = main(["--seeds", "0:6", "--json", str(file)], judge_seed=_create_outcome)

    assert code == 1
    out = capsys.readouterr().out
    assert "REFUSED 3 a net | noise_ratio ort-cpu out0: 2 / 1" in out
    assert "3 of 5 correct nets refused" in out
    assert "1 of 6 seeds not applicable" in out
    assert [item["seed"] for item in json.loads(file.read_text())] == list(range(6))


def test_one_refused_of_a_thousand_is_allowed() -> None:
    right = [_create_outcome(0)] * 999
    assert holds([*right, _create_outcome(1)])
    assert not holds([*right, _create_outcome(1), _create_outcome(1)])
    assert not holds([])
    shaky = replace(_create_outcome(1), shaky="out0")
    assert holds([*right, shaky, shaky])
    assert "of 2 that float32 itself does not answer, 2" in format_rates([shaky, shaky])
