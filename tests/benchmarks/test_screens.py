"""What `make screens` is made of; the pictures themselves are for people to look at."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.screens import digits, scene, sheet, workbench
from benchmarks.screens.camera import LAPTOP, Picture


def test_the_samples_are_those_of_the_spec() -> None:
    shown, labels = digits.pictures()
    inputs = np.stack(
        [workbench.implementations.pillow_preprocess(one, workbench.SPEC) for one in shown[:4]]
    )
    with torch.no_grad():
        assert digits.network().eval()(torch.from_numpy(inputs)).shape == (4, 10)
    assert len(set(labels.tolist())) == 10


def test_every_judgment_has_its_policy() -> None:
    judged = (scene.FIRST, scene.SECOND, *scene.REJECTED)
    assert {one.policy.removesuffix(".yaml") for one in judged} == workbench._policies().keys()
    assert sorted({one.code for one in judged}) == [0, 1, 2]


def test_the_sheet_shows_each_picture_and_the_readme_gets_its_three(tmp_path: Path) -> None:
    taken = []
    for name, _ in sheet.README.values():
        path = tmp_path / f"{name}.png"
        Image.new("RGB", LAPTOP, "red").save(path)
        taken.append(Picture(path, LAPTOP, f"{name} <&>"))
    text = sheet.write_sheet(tmp_path, taken).read_text()
    assert text.count("<img") == 3
    assert "&lt;&amp;&gt;" in text
    sheet.write_small(tmp_path, tmp_path)
    for name, (_, height) in sheet.README.items():
        with Image.open(tmp_path / f"{name}.png") as small:
            assert small.size == (LAPTOP[0], height)
            assert small.convert("RGB").getpixel((5, 5)) == (255, 0, 0)


def test_a_command_that_ends_otherwise_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="it was refused")

    monkeypatch.setattr(subprocess, "run", run)
    acted = scene.ExplanationInputs(tmp_path, "http://127.0.0.1:1")
    with pytest.raises(scene.RegistryUnavailable, match="ended with 1, expected 0: it was refused"):
        acted.reconcile()
