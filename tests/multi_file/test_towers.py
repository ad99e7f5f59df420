"""Models of several files as people ship them: two towers, an encoder with a decoder in a loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gate.api import EvaluationResult, check
from gate.decision.check_result import Verdict
from gate.measure.job import EvaluationData, Reference
from gate.report.html_page import Report, render_page
from gate.summary.summarize import summarize
from tests.exhaustive import exhaustive
from tests.multi_file import towers
from tests.multi_file.exports import export

pytestmark = pytest.mark.proof
COUNT = 12


def judged(folder: Path, chain: str, factory: str, **files: str) -> EvaluationResult:
    lines = [f"  {name}: {{file: {file}}}" for name, file in files.items()]
    path = folder / "release.yaml"
    path.write_text("\n".join([f"chain: tests.multi_file.towers:{chain}", "parts:", *lines, ""]))
    return check(
        path,
        reference=Reference.from_factory(f"tests.multi_file.towers:{factory}"),
        data=EvaluationData.open(folder / "x.npz", batch_size=4),
    )


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rng, model = np.random.default_rng(0), towers.towers()
    tokens = np.concatenate([rng.integers(1, 31, (COUNT, 5)), np.full((COUNT, 1), 31)], axis=1)
    pixels = rng.normal(size=(COUNT, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", pixels=pixels, tokens=tokens)
    export(model.image, tmp_path / "image.onnx", torch.zeros(2, 3, 8, 8))
    export(model.text, tmp_path / "text.onnx", torch.from_numpy(tokens[:2]))
    return tmp_path


def test_both_towers_are_judged_as_one(pairs: Path) -> None:
    verdicted = judged(pairs, "match", "towers", image="image.onnx", text="text.onnx")
    assert verdicted.decision.passed, verdicted.decision.problems
    assert set(verdicted.evidence.parts) == {"image", "text"}


@exhaustive
def test_a_tower_of_another_training_is_named(pairs: Path) -> None:
    model = towers.towers()
    with torch.no_grad():
        model.image.projection.weight[0] *= 1.05
    export(model.image, pairs / "other.onnx", torch.zeros(2, 3, 8, 8))
    verdicted = judged(pairs, "match", "towers", image="other.onnx", text="text.onnx")
    assert verdicted.decision.verdict is Verdict.FAIL
    assert {c.part for c in verdicted.decision.problems} <= {"image", None}
    assert any(c.part == "image" for c in verdicted.decision.problems)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    model, rng = towers.translator(), np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", source=rng.normal(size=(COUNT, 5, 8)).astype(np.float32))
    export(model.encoder, tmp_path / "encoder.onnx", torch.zeros(2, 5, 8))
    tokens, memory = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 5, 8)
    export(model.decoder, tmp_path / "decoder.onnx", tokens, memory, grows="in_0")
    export(model.decoder, tmp_path / "baked.onnx", tokens[:, :1], memory)
    return tmp_path


def test_a_decoder_in_a_loop_is_judged(steps: Path) -> None:
    files = {"encoder": "encoder.onnx", "decoder": "decoder.onnx"}
    verdicted = judged(steps, "translate", "translator", **files)
    assert verdicted.decision.passed, verdicted.decision.problems
    later_steps = 2 * COUNT // 4  # of each batch, whose tokens grow
    left_out = {name: part.dataset.left_out for name, part in verdicted.evidence.parts.items()}
    assert left_out == {"encoder": 0, "decoder": later_steps}
    summary = summarize(verdicted.decision, verdicted.evidence)
    page = render_page(Report(summary, verdicted.evidence, verdicted.decision))
    assert f"{later_steps} calls of other sizes were judged in the chain alone" in page


def test_a_decoder_of_one_step_alone_is_refused_by_the_chain(steps: Path) -> None:
    """Its own samples are the first step; only the loop asks for more."""
    files = {"encoder": "encoder.onnx", "decoder": "baked.onnx"}
    verdicted = judged(steps, "translate", "translator", **files)
    assert verdicted.decision.verdict is Verdict.FAIL
    whole = verdicted.evidence.runtime("ort-cpu")
    assert whole is not None
    assert "before the part decoder: the chain passes int64" in str(whole.failure)
