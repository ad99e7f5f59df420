from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gate.errors import PolicyError
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, OperatingPoint, RuntimePolicy
from tests import builders

BOUNDED = {
    "ort-cpu": RuntimePolicy(
        required="always",
        bounds=Bounds(max_abs_diff=1e-4, top1_agreement=1.0, threshold_crossing=0.01),
    )
}


def policy(**fields):
    return Policy(**{"runtimes": BOUNDED, "operating_points": (0.5,)} | fields)


@pytest.mark.parametrize(
    ("stated", "points"),
    [
        ((0.9, 0.5, 0.9), [OperatingPoint(0.5), OperatingPoint(0.9)]),
        ({3: (0.7,), 0: (0.8, 0.6)}, [(0.6, 0), (0.8, 0), (0.7, 3)]),
    ],
)
def test_points_are_sorted_and_unique(stated, points):
    created = policy(operating_points=stated)
    assert list(created.points) == points
    assert Policy.from_json(created.to_json()) == created
    assert Policy.from_json(created.to_json()).digest() == created.digest()


def test_order_of_points_does_not_change_the_digest():
    assert (
        policy(operating_points=(0.5, 0.9)).digest() == policy(operating_points=(0.9, 0.5)).digest()
    )
    first, second = policy(operating_points={0: (0.5,), 3: (0.9,)}), {3: (0.9,), 0: (0.5,)}
    assert first.digest() == policy(operating_points=second).digest()


@pytest.mark.parametrize("nothing", [(), {}])
def test_empty_points_do_not_change_the_digest(nothing):
    assert builders.policy(operating_points=nothing).digest() == builders.policy().digest()
    assert "operating_points" not in builders.policy(operating_points=nothing).to_plain()


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ((0.0,), "greater than 0"),
        ((1.0,), "less than 1"),
        ((float("nan"),), "finite number"),
        (("0.5",), "valid number"),
        ({-1: (0.5,)}, "greater than or equal to 0"),
        ({3: ()}, "at least 1 item"),
        ({"three": (0.5,)}, "valid integer"),
        (0.5, "tuple"),
    ],
)
def test_invalid_operating_point_is_refused(points, words):
    with pytest.raises(ValidationError, match=words):
        policy(operating_points=points)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"operating_points": ()}, "ort-cpu: threshold_crossing needs operating_points"),
        ({"runtimes": builders.policy().runtimes}, "no runtime bounds threshold_crossing"),
        ({"task": "tensors"}, "threshold_crossing, top1_agreement need logits"),
        ({"task": "auto"}, "threshold_crossing need logits, and an inferred role is not enough"),
    ],
)
def test_points_need_bounds_and_class_outputs(fields, words):
    with pytest.raises(ValidationError, match=words):
        policy(**fields)


def test_auto_task_with_named_logits_accepts_points():
    assert policy(task="auto", outputs={"logits": "logits"}).points == (OperatingPoint(0.5),)


def test_bounds_of_unmeasured_runtime_do_not_count():
    runtimes = {"ort-cuda": RuntimePolicy(required="never", bounds=BOUNDED["ort-cpu"].bounds)}
    with pytest.raises(ValidationError, match="no runtime bounds"):
        builders.policy(operating_points=(0.5,), runtimes=builders.policy().runtimes | runtimes)


def write_policy(path: Path, points: str) -> Path:
    path.write_text(
        "gate:\n"
        f"  operating_points: {points}\n"
        "  runtimes:\n"
        "    ort-cpu:\n"
        "      required: always\n"
        "      bounds: {max_abs_diff: 1e-4, top1_agreement: 1.0, threshold_crossing_bound: 0.02}\n"
    )
    return path


@pytest.mark.parametrize(
    ("points", "expected"),
    [("[0.5, 0.9]", [(0.5, None), (0.9, None)]), ("{3: [0.7]}", [(0.7, 3)])],
)
def test_points_are_read_from_a_file(tmp_path, points, expected):
    assert list(Policy.load(write_policy(tmp_path / "params.yaml", points)).points) == expected


@pytest.mark.parametrize("points", ["[1.5]", "{3: [1.5]}"])
def test_invalid_point_in_file_is_reported_with_line(tmp_path, points):
    with pytest.raises(PolicyError, match=r"params.yaml:2: gate.operating_points.*less than 1"):
        Policy.load(write_policy(tmp_path / "params.yaml", points))
