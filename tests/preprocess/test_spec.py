from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gate import GateError, PreprocessSpec

SIDES = st.integers(1, 512)
NUMBERS = st.floats(0.001, 2.0)


@st.composite
def specs(draw: st.DrawFn) -> PreprocessSpec:
    mode = draw(st.sampled_from(["nearest", "bilinear", "bicubic"]))
    antialias = draw(st.booleans()) and mode != "nearest"
    height, width = draw(SIDES), draw(SIDES)
    by_side = draw(st.booleans())
    resize = {
        "size": None if by_side else (height, width),
        "shortest_side": min(height, width) if by_side else None,
        "mode": mode,
        "antialias": antialias,
    }
    most = (min(height, width),) * 2 if by_side else (height, width)
    crop = (draw(st.integers(1, most[0])), draw(st.integers(1, most[1])))
    mean = draw(st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS))
    return PreprocessSpec(
        resize=draw(st.sampled_from([None, resize])),
        crop=draw(st.sampled_from([None, crop])),
        channels=draw(st.sampled_from(["rgb", "bgr"])),
        value_range=draw(st.sampled_from([(0, 1), (0, 255), (-1, 1)])),
        mean=mean,
        std=None if mean is None else draw(st.tuples(NUMBERS, NUMBERS, NUMBERS)),
        layout=draw(st.sampled_from(["nchw", "nhwc"])),
    )


@given(specs(), specs())
def test_spec_survives_json_with_equal_digest(spec: PreprocessSpec, other: PreprocessSpec) -> None:
    again = PreprocessSpec.from_json(spec.to_json())
    assert again == spec
    assert again.digest() == spec.digest()
    assert (spec.digest() == other.digest()) == (spec == other)


def test_digest_of_imagenet_spec_is_stable() -> None:
    """The digest is in evidence, so that new fields must not change it (`later`)."""
    assert PreprocessSpec.imagenet().digest().hex == (
        "a8b64ce5d065a3091b59d90257d1b1a5d89b994d4e2e599ced0b640f144fb3e6"
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"resize": {}}, "exactly one of size"),
        ({"resize": {"size": [8, 8], "shortest_side": 8}}, "exactly one of size"),
        ({"resize": {"size": [8, 0]}}, "greater than or equal to 1"),
        ({"resize": {"size": [8, 8], "mode": "nearest"}}, "can't antialias"),
        ({"resize": {"size": [8, 8], "mode": "area"}}, "'nearest', 'bilinear' or 'bicubic'"),
        (
            {"resize": {"size": [8, 8]}, "crop": [9, 8]},
            "crop .* is larger than the resized picture",
        ),
        ({"resize": {"shortest_side": 8}, "crop": [8, 9]}, "larger than the resized picture"),
        ({"mean": [0.5, 0.5, 0.5]}, "both mean and std"),
        ({"std": [0.5, 0.5, 0.5]}, "both mean and std"),
        ({"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.0, 0.5]}, "greater than 0"),
        ({"mean": [0.5, 0.5, 0.5], "std": [0.5, -1.0, 0.5]}, "greater than 0"),
        ({"mean": [0.5, 0.5, 0.5], "std": [0.5, "NaN", 0.5]}, "valid number"),
        ({"mean": [0.5], "std": [0.5]}, "Field required"),
        ({"value_range": [-1, 255]}, r"\[0, 1\], \[0, 255\] or \[-1, 1\]"),
        ({"value_range": [0, 2]}, "1 or 255"),
        ({"dtype": "uint8"}, "needs value_range"),
        ({"dtype": "float16", "mean": [0.5] * 3, "std": [1e-6] * 3}, "range of float16"),
        ({"layout": "chw"}, "'nchw' or 'nhwc'"),
        ({"colour": "rgb"}, "Extra inputs"),
    ],
)
def test_invalid_spec_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises((ValidationError, GateError), match=says):
        PreprocessSpec.model_validate_json(json.dumps(fields))


def test_file_contains_a_section_or_the_spec(tmp_path: Path) -> None:
    body = "resize: {shortest_side: 256}\ncrop: [224, 224]\n"
    body += "mean: [0.485, 0.456, 0.406]\nstd: [0.229, 0.224, 0.225]\n"
    (tmp_path / "whole.yaml").write_text(body)
    indented = "".join(f"  {line}\n" for line in body.splitlines())
    (tmp_path / "section.yaml").write_text(f"gate: {{}}\npreprocessing:\n{indented}")
    for name in ("whole.yaml", "section.yaml"):
        assert PreprocessSpec.from_file(tmp_path / name) == PreprocessSpec.imagenet()
