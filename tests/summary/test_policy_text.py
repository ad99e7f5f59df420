from __future__ import annotations

from pathlib import Path

import pytest

from gate.policy.policy import Policy
from gate.policy.sections import ReviewTag
from gate.summary.policy_docs import RUNTIME, policy_fields, policy_text

ROOT = Path(__file__).parents[2]
ODD = Policy.default().model_copy(update={"review_tag": ReviewTag(approved="yes", rejected="null")})


@pytest.mark.parametrize(
    "policy",
    [
        Policy.default(),
        Policy.default(task="tensors"),
        Policy.quantized(),
        Policy.load(ROOT / "params.yaml"),
        ODD,
    ],
)
def test_who_reads_the_text_gets_the_policy(tmp_path: Path, policy: Policy) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text(policy_text(policy, name="gate.yaml"))
    assert Policy.from_file(file) == policy


def test_every_field_is_there_with_what_it_means() -> None:
    text = policy_text(Policy.default(), name="gate.yaml")
    words = set(text.replace(",", " ").replace(":", " ").replace(".", " ").split())
    absent = (
        "preprocessing.",
        "incumbent.",
        "tried",
        "confidence_bands.",
        ".kind",
        ".options",
        "metrics[].",
    )
    for field in policy_fields():
        if not any(part in field.place for part in absent):
            assert field.name in words, field.place
    assert f"# {next(f for f in policy_fields() if f.place == 'nonfinite').text[:40]}" in text
    assert RUNTIME not in text
    assert text.count("bounds: &") == 2  # of the CPU, of CUDA: once each
    assert max(len(line) for line in text.splitlines() if "graph_forbid" not in line) <= 100
