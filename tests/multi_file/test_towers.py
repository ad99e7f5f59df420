"""Two-tower and encoder-decoder releases."""

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
from tests.multi_file import towers
from tests.multi_file.exports import export

pytestmark = pytest.mark.proof
COUNT = 12


def checked(folder: Path, chain: str, factory: str, **files: str) -> EvaluationResult:
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


def test_two_towers_pass_as_one_release(pairs: Path) -> None:
    verdicted = checked(pairs, "match", "towers", image="image.onnx", text="text.onnx")
    assert verdicted.decision.passed, verdicted.decision.problems
    assert set(verdicted.evidence.parts) == {"image", "text"}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    model, rng = towers.translator(), np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", source=rng.normal(size=(COUNT, 5, 8)).astype(np.float32))
    export(model.encoder, tmp_path / "encoder.onnx", torch.zeros(2, 5, 8))
    tokens, memory = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 5, 8)
    export(model.decoder, tmp_path / "decoder.onnx", tokens, memory, grows="in_0")
    export(model.decoder, tmp_path / "baked.onnx", tokens[:, :1], memory)
    return tmp_path


def test_decoder_in_a_loop_passes(steps: Path) -> None:
    files = {"encoder": "encoder.onnx", "decoder": "decoder.onnx"}
    verdicted = checked(steps, "translate", "translator", **files)
    assert verdicted.decision.passed, verdicted.decision.problems
    later_steps = 2 * COUNT // 4  # of each batch, whose tokens grow
    left_out = {name: part.dataset.left_out for name, part in verdicted.evidence.parts.items()}
    assert left_out == {"encoder": 0, "decoder": later_steps}
    summary = summarize(verdicted.decision, verdicted.evidence)
    page = render_page(Report(summary, verdicted.evidence, verdicted.decision))
    assert f"{later_steps} calls of other sizes were judged in the chain alone" in page


def test_decoder_with_a_fixed_step_is_refused(steps: Path) -> None:
    """Its own samples are the first step; only the loop asks for more."""
    files = {"encoder": "encoder.onnx", "decoder": "baked.onnx"}
    verdicted = checked(steps, "translate", "translator", **files)
    assert verdicted.decision.verdict is Verdict.FAIL
    complete = verdicted.evidence.runtime("ort-cpu")
    assert complete is not None
    assert "before the part decoder: the chain passes int64" in str(complete.failure)
