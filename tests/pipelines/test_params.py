from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import PolicyError
from gate.policy.policy import Policy
from pipelines.override import override
from pipelines.params import ModelParams, check_all, load_policy
from tests.pipelines.conftest import REPOSITORY


def test_the_settings_of_the_repository_are_valid() -> None:
    check_all(REPOSITORY / "params.yaml")


def test_the_policy_of_the_repository_bounds_every_runtime() -> None:
    policy = load_policy(REPOSITORY / "params.yaml")
    assert {name for name, r in policy.runtimes.items() if r.required == "always"} == {
        "ort-cpu",
        "ort-cpu-optimized",
    }
    of_roles = {"cosine_distance", "row_sum_diff", "unequal_share"}
    at_points = {"threshold_crossing", "threshold_crossing_bound"}  # nobody knows yours
    for runtime in policy.runtimes.values():
        assert all(
            bound is not None for name, bound in runtime.bounds if name not in of_roles | at_points
        )
    assert policy != Policy.default()


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("size: [16, 16]", "size: sixteen", "prepare.preprocessing.resize.size"),
        ("size: [16, 16]", "size: [-3, 16]", "prepare.preprocessing.resize.size.0"),
        ("size: [16, 16]", "shortest_side: 16", "prepare"),
        ("source: digits", "source: internet", "prepare.source"),
        ("std: [0.5, 0.5, 0.5]", "std: [0.5, 0.0, 0.5]", "prepare.preprocessing.std.1"),
        ("mean: [0.5, 0.5, 0.5]", "mean: [0.5, .nan, 0.5]", "prepare.preprocessing.mean"),
        ("eval_share: 0.25", "eval_share: 1.0", "prepare.eval_share"),
        ("epochs: 1", "epochs: -1", "train.epochs"),
        ("momentum: 0.9", "momentum: 0.9\n  nesterov: true", "train.nesterov"),
        ("learning_rate: 0.02", "learning_rate: .inf", "train.learning_rate"),
        ("opset: 13", "opset: '13'", "export.opset"),
        ("max_abs_diff: 1.0e-4", "max_abs_diff: -1.0", "max_abs_diff"),
        ("max_abs_diff: 1.0e-4", "max_abs_diff: .nan", "max_abs_diff"),
        ("model_name: tiny", "model_name: ''", "registry.model_name"),
        ("factory: tests.pipelines.tiny:network", "factory: null", "model"),
        ("weights: null", "weights: IMAGENET1K_V1", "model"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(
    project: Path, old: str, new: str, place: str
) -> None:
    path = project / "params.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PolicyError) as caught:
        check_all(path)
    message = str(caught.value)
    assert place in message
    lines = path.read_text().splitlines()
    number = int(message.split(":")[1])
    words = (*(part.partition(":")[0].strip() for part in new.split("\n")), place)
    assert any(word in lines[number - 1] for word in words), (number, message)


def test_all_wrong_fields_are_told_at_once(project: Path) -> None:
    path = project / "params.yaml"
    path.write_text(
        path.read_text().replace("epochs: 1", "epochs: -1").replace("opset: 13", "opset: 99")
    )
    with pytest.raises(PolicyError, match=r"(?s)train\.epochs.*export\.opset"):
        check_all(path)


def test_override_keeps_comments_and_reads_back(project: Path) -> None:
    before = (project / "params.yaml").read_text()
    override(["train.epochs=3", "model.factory="])  # an empty value is none
    after = (project / "params.yaml").read_text()
    assert "epochs: 3  " in after
    assert ModelParams.load().factory == "tests.pipelines.tiny:network"
    assert [line.partition("#")[2] for line in after.splitlines()] == [
        line.partition("#")[2] for line in before.splitlines()
    ]


@pytest.mark.parametrize(
    "setting", ["train.nothing=1", "nothing=1", "train.epochs=-1", "train.epochs=[", "a.b.c=1", "x"]
)
def test_a_refused_override_changes_nothing(project: Path, setting: str) -> None:
    before = (project / "params.yaml").read_bytes()
    with pytest.raises(PolicyError):
        override([setting])
    assert (project / "params.yaml").read_bytes() == before
    assert [path.name for path in project.iterdir() if path.suffix == ".tmp"] == []
