"""Options of one engine are refused with the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gate.commands.check import command


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--workers", "2"], "--workers is for a cluster. Say --engine ray, too."),
        (["--address", "auto"], "--address is for a cluster"),
        (["--gpus-per-worker", "1"], "--gpus-per-worker is for a cluster"),
        (["--engine", "ray", "--jobs", "2"], "With --engine ray say --workers N."),
        (["--engine", "slurm"], "is not one of 'processes', 'ray'"),
    ],
)
def test_what_does_not_fit_is_refused(options: list[str], text: str, tmp_path: Path) -> None:
    onnx, inputs = tmp_path / "model.onnx", tmp_path / "x.npy"
    onnx.touch()
    np.save(inputs, np.zeros((4, 6), np.float32))
    question = [str(onnx), "--reference", "tests.scale.tiny:build", "--inputs", str(inputs)]
    done = CliRunner().invoke(command, [*question, *options])
    assert done.exit_code == 2
    assert text in done.output.replace("\n", " ")
