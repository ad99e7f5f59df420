"""`gate mend`, and `gate export --recipe` with the recipe that it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from ruamel.yaml import YAML

from gate.export.quantize import QuantizeSettings
from gate.mend.recipe import (
    Float32Layers,
    Inputs,
    Recipe,
    SearchRecord,
    Steps,
    Verification,
)
from gate.onnx_file.reading import read_subject
from gate.policy.policy import Policy
from gate.storage.digest import Digest
from tests import small_project
from tests.commands.running import create_runner

_, mend = create_runner("mend")
run_mend, _ = create_runner("mend")
_, export = create_runner("export")
run_export, _ = create_runner("export")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder for outputs; the user's project is the current folder."""
    monkeypatch.chdir(small_project.create_project())
    return tmp_path


def create_arguments(project, *more: str) -> list[str]:
    return ["--reference", "small_models:build", "--inputs", "images.npy",
            "--output", str(project / "mended"), *more]  # fmt: skip


@pytest.mark.further
def test_a_file_with_another_weight_is_mended_and_made_again_by_its_recipe(project, capsys):
    code, reported = mend(capsys, *create_arguments(project, "--file", "bad.onnx"))
    assert code == 0
    assert [(t["half"], t["verdict"]) for t in reported["trials"]] == [
        ("search", "FAIL"), ("search", "PASS"), ("verify", "PASS"),
    ]  # fmt: skip
    created = project / "mended" / "model.onnx"
    subject = read_subject(created)
    assert [item.name for item in (*subject.inputs, *subject.outputs)] == ["input", "logits"]
    assert reported["recipe"]["sha256"] == str(subject.sha256)
    assert (
        json.loads((project / "mended" / "trials.json").read_text())["winner"] == reported["winner"]
    )

    recipe = project / "mended" / "recipe.yaml"
    again = project / "again.onnx"
    code, _ = export(capsys, "--recipe", str(recipe), "--output", str(again))
    assert code == 0
    assert again.read_bytes() == created.read_bytes()
    note = created.with_name("model.onnx.export.json").read_bytes()
    assert again.with_name("again.onnx.export.json").read_bytes() == note

    document = YAML().load(recipe)
    document["steps"]["export"]["opset"] = 17
    YAML().dump(document, recipe)
    again.unlink()
    code, _, err = run_export(capsys, "--recipe", str(recipe), "--output", str(again))
    assert (code, again.exists()) == (2, False)
    assert "expected" in err

    code, reported = mend(
        capsys, *create_arguments(project, "--file", "bad.onnx", "--budget", "33")
    )
    assert (code, reported["ended_by"], reported["verdict"]) == (1, "budget", "FAIL")
    assert reported["closest"] == reported["trials"][0]["title"]
    assert not created.exists()
    assert not recipe.exists()


@pytest.mark.parametrize("option", ["--file", "--inputs"])
def test_what_the_search_uses_is_not_in_its_folder(project, capsys, option):
    folder = project / "mended"
    folder.mkdir()
    source = "bad.onnx" if option == "--file" else "images.npy"
    used = folder / ("model.onnx" if option == "--file" else "policy.json.npy")
    content = Path(source).read_bytes()
    used.write_bytes(content)
    code, _, err = run_mend(capsys, *create_arguments(project, option, str(used)))
    assert (code, used.read_bytes()) == (2, content)
    assert option in err


@pytest.mark.parametrize("name", ["model.onnx", "policy.json"])
def test_a_file_of_the_user_is_left_as_it_is(project, capsys, name):
    folder = project / "mended"
    folder.mkdir()
    content = Path("bad.onnx").read_bytes()
    (folder / name).write_bytes(content)
    code, _, err = run_mend(capsys, *create_arguments(project))
    assert (code, (folder / name).read_bytes()) == (2, content)
    assert "recipe.yaml" in err
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_candidate_that_was_not_verified_is_no_error(project, capsys):
    code, result = mend(capsys, *create_arguments(project, "--budget", "40"))
    assert [(trial["half"], trial["verdict"]) for trial in result["trials"]] == [("search", "PASS")]
    assert (code, result["verdict"], result["ended_by"]) == (1, "FAIL", "budget")


def test_a_comparison_with_what_serves_is_left_to_gate_check(project, capsys):
    plain = Policy.default(task="classification").to_plain()
    plain["incumbent"] = {"first_release": "allow", "min_agreement": 0.9}
    policy = project / "policy.json"
    policy.write_text(json.dumps(plain))
    code, out, _ = run_mend(
        capsys, *create_arguments(project, "--file", "good.onnx", "--policy", str(policy))
    )
    assert code == 0, out
    assert "incumbent" in out
    written = Policy.from_file(project / "mended" / "policy.json")
    assert written.incumbent == Policy.from_file(policy).incumbent


@pytest.mark.parametrize("kind", ["server", "recorded"])
def test_a_policy_with_answers_from_elsewhere_is_refused_at_once(project, capsys, kind):
    options = {"server": {"url": "http://127.0.0.1:9/v2/models/net"}, "recorded": {}}[kind]
    plain = Policy.default(task="tensors").to_plain()
    plain["runtimes"]["there"] = {
        "required": "always", "kind": kind, "options": options, "bounds": {"max_abs_diff": 1.0},
    }  # fmt: skip
    policy = project / "policy.json"
    policy.write_text(json.dumps(plain))
    code, _, err = run_mend(capsys, *create_arguments(project, "--policy", str(policy)))
    assert (code, (project / "mended").exists()) == (2, False)
    assert "--set runtimes.there.required=never" in err


def test_samples_that_no_file_can_be_measured_on_end_the_search(project, capsys):
    source = ["--reference", "small_models:build", "--inputs", "nan.npy"]
    code, _, err = run_mend(capsys, *source, "--output", str(project / "mended"))
    assert code == 2
    assert "NaN" in err
    assert "trial 2" not in err


@pytest.mark.further
def test_what_refused_the_closest_candidates_is_said_once_in_a_sentence(project, capsys):
    code, out, _ = run_mend(
        capsys, "--reference", "small_models:field", "--inputs", "field.npz", "--precision",
        "quantized", "--output", str(project / "mended"),
    )  # fmt: skip
    assert code == 2
    shown = [line for line in out.splitlines() if line.startswith(("closest", "then"))]
    assert len(shown) == 1
    assert "violated_quantized" not in shown[0]


def test_one_sample_is_refused(project, capsys):
    np.save(project / "one.npy", np.load("images.npy")[:1])
    code, _, err = run_mend(
        capsys, "--reference", "small_models:build", "--inputs", str(project / "one.npy"),
        "--output", str(project / "mended"),
    )  # fmt: skip
    assert code == 2
    assert "at least 2" in err
    assert not (project / "mended").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--recipe", "recipe.yaml", "--output", "m.onnx", "--opset", "13"], "--opset"),
        (["small_models:build", "--recipe", "recipe.yaml", "--output", "m.onnx"], "FACTORY"),
        (["small_models:build", "--output", "m.onnx"], "--example-input"),
        (["--example-input", "images.npy", "--output", "m.onnx"], "FACTORY"),
    ],
)
def test_a_recipe_goes_with_an_output_alone(project, capsys, arguments, word):
    (project / "recipe.yaml").write_text("schema_version: 1\n")
    placed = [str(project / a) if a in ("recipe.yaml", "m.onnx") else a for a in arguments]
    code, _, err = run_export(capsys, *placed)
    assert code == 2
    assert word in err


def test_a_recipe_with_infinite_numbers_is_read_again(project):
    digest = Digest.from_bytes(b"any")
    recipe = Recipe(
        stage="quantization",
        inputs=Inputs(factory="a:b", samples="x.npy", samples_sha256=digest),
        steps=Steps(quantize=QuantizeSettings(exclude=("last",))),
        float32=Float32Layers(count=1, share=0.5, sensitivity={"last": math.inf}),
        sha256=digest,
        verified=Verification(
            samples=3, policy_sha256=digest, runtimes=("ort-cpu",), worst_ratio=math.inf
        ),
        search=SearchRecord(budget=9, forwards=8, ended_by="time"),
    )
    recipe.write(project / "recipe.yaml")
    assert Recipe.read(project / "recipe.yaml") == recipe
