"""`measure_preprocessing` measures consumers, and the rules accept or reject the results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gate import PreprocessSpec, Verdict, decide
from gate.onnx_file.reading import read_subject
from gate.policy.sections import PreprocessingPolicy
from gate.preprocess.comparison import ModelFile, measure_preprocessing
from gate.preprocess.implementations import pillow_preprocess
from gate.preprocess.pictures import Picture
from gate.records.evidence import Source
from tests import builders
from tests.preprocess.by.test_onnx_graph import classifier
from tests.preprocess.pictures import SMALL, picture

PHOTOS = tuple(
    Picture(f"{seed}.png", lambda seed=seed: picture(90, 70 + seed, seed=seed))  # type: ignore[misc]
    for seed in range(4)
)


@pytest.mark.parametrize(
    ("consumers", "verdict"),
    [
        (("torchvision", "onnx", "own"), Verdict.PASS),
        (("torchvision", "opencv", "own"), Verdict.FAIL),
    ],
)
def test_measurement_is_decided(
    tmp_path: Path, consumers: tuple[str, ...], verdict: Verdict
) -> None:
    model = classifier(tmp_path / "model.onnx")
    file = ModelFile(model, read_subject(model).sha256)
    settings = PreprocessingPolicy(consumers=consumers, min_images=4, max_flips=0.5)
    custom = {"own": np.stack([pillow_preprocess(photo.read(), SMALL) for photo in PHOTOS])}
    observed = measure_preprocessing(SMALL, PHOTOS, policy=settings, model=file, dumped=custom)
    good = builders.evidence(
        preprocessing=observed,
        source=Source(factory="f", preprocess_sha256=SMALL.digest()),
        subject=read_subject(model),
    )
    decision = decide(builders.policy(preprocessing=settings), good, decided_at="now")
    assert decision.verdict is verdict
    assert {c.runtime for c in decision.problems} <= {None}


@pytest.mark.parametrize("chromium", [None, "/usr/bin/chromium"])
def test_incapable_consumer_is_never_waived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chromium: str | None
) -> None:
    monkeypatch.setattr("gate.installation.shutil.which", lambda _: chromium)
    settings = PreprocessingPolicy(consumers=("canvas",), required="when_present", min_images=4)
    bicubic = PreprocessSpec(resize={"size": (32, 36), "mode": "bicubic"}, crop=(32, 36))
    observed = measure_preprocessing(bicubic, PHOTOS, policy=settings)
    assert observed.consumers[0].incapable == "a canvas has no bicubic filter"
    good = builders.evidence(
        preprocessing=observed,
        source=Source(factory="f", preprocess_sha256=bicubic.digest()),
        subject=read_subject(classifier(tmp_path / "model.onnx")),
    )
    decision = decide(builders.policy(preprocessing=settings), good, decided_at="now")
    assert [c.name for c in decision.problems] == ["preprocessing_canvas"]
