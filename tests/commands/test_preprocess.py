"""`gate preprocess` compares implementations on the user's pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from gate import PreprocessSpec
from gate.onnx_file.reading import read_subject
from gate.preprocess.implementations import pillow_preprocess
from gate.preprocess.pictures import read_picture
from gate.records.preprocessing import PreprocessingParity
from tests.commands.running import create_runner
from tests.preprocess.by.test_onnx_graph import classifier
from tests.preprocess.pictures import SMALL, picture

run, _ = create_runner("preprocess")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for seed in range(3):
        Image.fromarray(picture(90, 70 + seed, seed=seed)).save(f"photos/{seed}.png")
    SMALL.save(Path("spec.json"))
    classifier(Path("model.onnx"))
    return tmp_path


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, "compare", "photos", "--spec", "spec.json", "--json", *arguments)
    return code, json.loads(out)


def test_equal_preprocessing_passes_and_different_is_rejected(capsys) -> None:
    code, plain = compare(capsys, "--implementations", "torchvision,onnx,rust-image")
    assert (code, plain["exit_code"]) == (0, 0)
    assert plain["within"] == {"torchvision": True, "onnx": True, "rust-image": True}
    assert PreprocessSpec.from_json(json.dumps(plain["spec"])) == SMALL
    code, plain = compare(
        capsys, "--implementations", "torchvision,opencv", "--model", "model.onnx"
    )
    assert (code, plain["within"]["opencv"]) == (1, False)
    parity = PreprocessingParity.from_json(json.dumps(plain["comparison"]))
    opencv = parity.consumer("opencv")
    assert opencv is not None
    assert opencv.causes == ("no antialias",)
    assert opencv.decisions is not None
    assert opencv.decisions.images == 3


def test_model_is_named_as_in_the_evidence(capsys) -> None:
    model = onnx.load("model.onnx")
    onnx.save_model(model, "model.onnx", save_as_external_data=True, size_threshold=0)
    subject = read_subject(Path("model.onnx"))
    assert subject.external_data
    _, plain = compare(capsys, "--implementations", "torchvision", "--model", "model.onnx")
    assert plain["comparison"]["model_sha256"] == str(subject.sha256)


def test_wider_bound_passes(capsys) -> None:
    assert compare(capsys, "--implementations", "opencv", "--bound", "255")[0] == 0


def test_table_and_picture_are_written(capsys) -> None:
    names = "torchvision,torchvision-no-antialias,onnx-asymmetric"
    code, out, _ = run(capsys, "compare", "photos", "--spec", "spec.json", "--model", "model.onnx",
                       "--implementations", names, "--report", "report")  # fmt: skip
    assert code == 1
    assert "3 pictures, against pillow" in out
    assert re.search(r"torchvision +1 +\S+ +0 % +\S+ \S+ \S+ +0/3 +\S+ +same", out)
    assert "differs: no antialias; half-pixel shift" in out
    assert re.search(r"torchvision-no-antialias: no antialias \(explains \d\d", out)
    assert "pillow: min" in out
    assert "torchvision: shape [3, 32, 36], min" in out
    with Image.open("report/plots/preprocessing.png") as drawn:
        assert drawn.size > (1000, 600)
    assert PreprocessingParity.load(Path("report/preprocessing.json")).images == 3
    assert PreprocessSpec.from_file(Path("report/preprocessing-spec.json")) == SMALL


def test_tensors_of_a_custom_consumer(capsys) -> None:
    pixels = [read_picture(path) for path in sorted(Path("photos").iterdir())]
    np.save("good.npy", np.stack([pillow_preprocess(item, SMALL) for item in pixels]))
    np.save("bad.npy", np.stack([pillow_preprocess(item[..., ::-1], SMALL) for item in pixels]))
    assert compare(capsys, "--tensors", "phone=good.npy")[1]["within"] == {"phone": True}
    code, plain = compare(capsys, "--tensors", "phone=bad.npy", "--implementations", "onnx")
    assert (code, plain["within"]) == (1, {"onnx": True, "phone": False})
    assert plain["comparison"]["consumers"][1]["causes"] == ["channel order swapped"]


def test_missing_consumer_never_passes(capsys, monkeypatch) -> None:
    monkeypatch.setattr("gate.preprocess.implementations.find_spec", lambda _: None)
    code, out, _ = run(capsys, "compare", "photos", "--spec", "spec.json",
                       "--implementations", "onnx,opencv")  # fmt: skip
    assert code == 2
    assert "not measured: OpenCV is not installed: pip install" in out
    assert compare(capsys, "--implementations", "opencv")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("photos", "--implementations", "pilow"), "there is no implementation pilow"),
        (("photos", "--reference", "pilow"), "there is no implementation pilow"),
        (("photos", "--tensors", "own=good.npy", "--reference", "own"), "must be an"),
        (("photos", "--tensors", "own=two.npy"), "2 tensors for 3 pictures"),
        (("photos", "--implementations", "onnx", "--model", "one.onnx"), "does not accept"),
        (("empty",), "has no pictures"),
        (("torn.png",), "is not a complete picture"),
        (("photos/0.png", "photos"), "named twice"),
        (("photos", "--tensors", "phone=."), ". is a folder"),
        (("photos", "--tensors", "phone=model.onnx"), "cannot read model.onnx"),
        (("photos", "--tensors", "phone=torn.npz"), "cannot read torn.npz"),
        (("photos", "--tensors", "My_Phone=good.npy"), "a consumer's name has lowercase letters"),
        (("photos", "--tensors", f"{'a' * 65}=good.npy"), "a consumer's name"),
        (("photos", "--tensors", "a=good.npy", "--tensors", "a=good.npy"), "a occurs twice"),
        (("photos", "--tensors", "a=scalar.npy"), "has dtype float32 and shape []"),
        (("photos", "--tensors", "a=text.npy"), "has dtype <U1 and shape [3]"),
        (("photos", "--tensors", "a=several.npz"), "Expected an .npy file"),
        (("photos", "--tensors", "onnx=good.npy"), "is an implementation of the gate"),
    ],
)
def test_incomparable_input_is_reported(capsys, arguments: tuple[str, ...], says: str) -> None:
    np.save("good.npy", np.zeros((3, 3, 32, 36), np.float32))
    np.save("two.npy", np.zeros((2, 3, 32, 36), np.float32))
    np.save("scalar.npy", np.float32(1.0))
    np.save("text.npy", np.array(["a", "b", "c"]))
    np.savez("several.npz", a=np.zeros(3))
    Path("torn.npz").write_bytes(Path("several.npz").read_bytes()[:-30])
    Path("torn.png").write_bytes(Path("photos/0.png").read_bytes()[:-300])
    Path("empty").mkdir()
    classifier(Path("one.onnx"), shape=(2, 3, 32, 36))
    code, _, err = run(capsys, "compare", *arguments)
    assert code == 2
    assert says in err
    assert "unexpected" not in err


def test_prepend_writes_one_file(capsys) -> None:
    arguments = ("prepend", "model.onnx", "--spec", "spec.json", "--output", "whole.onnx")
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    assert json.loads(out)["input"] == "pictures"
    assert Path("whole.onnx").exists()
    code, out, _ = run(capsys, *arguments)
    assert "written: whole.onnx (sha256:" in out
    code, _, err = run(capsys, "prepend", "model.onnx", "--output", "imagenet.onnx")
    assert code == 2
    assert "the spec makes float32 [batch, 3, 224, 224]" in err
