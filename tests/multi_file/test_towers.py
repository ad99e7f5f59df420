"""Two-tower and encoder-decoder releases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gate import EvaluationData, EvaluationResult, Reference, Verdict, check
from gate.report.html_page import Report, render_page
from gate.summary.summarize import summarize
from tests.multi_file import towers
from tests.multi_file.exports import export_module

pytestmark = pytest.mark.proof
COUNT = 12


def check_release(folder: Path, chain: str, factory: str, **files: str) -> EvaluationResult:
    lines = [f"  {name}: {{file: {file}}}" for name, file in files.items()]
    path = folder / "release.yaml"
    path.write_text("\n".join([f"chain: tests.multi_file.towers:{chain}", "parts:", *lines, ""]))
    return check(
        path,
        reference=Reference.from_factory(f"tests.multi_file.towers:{factory}"),
        data=EvaluationData.open(folder / "x.npz", batch_size=4),
    )


@pytest.fixture
def towers_folder(tmp_path: Path) -> Path:
    rng, model = np.random.default_rng(0), towers.towers()
    tokens = np.concatenate([rng.integers(1, 31, (COUNT, 5)), np.full((COUNT, 1), 31)], axis=1)
    pixels = rng.normal(size=(COUNT, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", pixels=pixels, tokens=tokens)
    export_module(model.image, tmp_path / "image.onnx", torch.zeros(2, 3, 8, 8))
    export_module(model.text, tmp_path / "text.onnx", torch.from_numpy(tokens[:2]))
    return tmp_path


def test_two_towers_pass_as_one_release(towers_folder: Path) -> None:
    result = check_release(towers_folder, "match", "towers", image="image.onnx", text="text.onnx")
    assert result.decision.passed, result.decision.problems
    assert set(result.evidence.parts) == {"image", "text"}


@pytest.fixture
def translator_folder(tmp_path: Path) -> Path:
    model, rng = towers.translator(), np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", source=rng.normal(size=(COUNT, 5, 8)).astype(np.float32))
    export_module(model.encoder, tmp_path / "encoder.onnx", torch.zeros(2, 5, 8))
    tokens, memory = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 5, 8)
    export_module(model.decoder, tmp_path / "decoder.onnx", tokens, memory, dynamic_steps="in_0")
    export_module(model.decoder, tmp_path / "baked.onnx", tokens[:, :1], memory)
    return tmp_path


def test_decoder_in_a_loop_passes(translator_folder: Path) -> None:
    files = {"encoder": "encoder.onnx", "decoder": "decoder.onnx"}
    result = check_release(translator_folder, "translate", "translator", **files)
    assert result.decision.passed, result.decision.problems
    later_steps = 2 * COUNT // 4  # the later calls of each batch have more tokens
    left_out = {name: part.dataset.left_out for name, part in result.evidence.parts.items()}
    assert left_out == {"encoder": 0, "decoder": later_steps}
    summary = summarize(result.decision, result.evidence)
    page = render_page(Report(summary, result.evidence, result.decision))
    assert f"{later_steps} calls of other sizes were judged in the chain alone" in page


def test_decoder_with_a_fixed_step_is_refused(translator_folder: Path) -> None:
    """The samples of the decoder are its first step; only the loop in the chain uses longer inputs."""
    files = {"encoder": "encoder.onnx", "decoder": "baked.onnx"}
    result = check_release(translator_folder, "translate", "translator", **files)
    assert result.decision.verdict is Verdict.FAIL
    runtime = result.evidence.runtime("ort-cpu")
    assert runtime is not None
    assert "before the part decoder: the chain passes int64" in str(runtime.failure)
