"""`gate schema` prints the published schemas, with which check-jsonschema validates files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from gate import Policy, decide
from gate.commands.schema import NAMES, schema_of
from gate.summary.policy_docs import policy_text
from gate.summary.summarize import summarize
from tests import builders
from tests.commands.running import Capture, create_runner

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
run, as_json = create_runner("schema")

RELEASE = "chain: mine.detector:run\nparts:\n  head: {file: head.onnx}\n"


@pytest.mark.parametrize("name", NAMES)
def test_published_schema_is_up_to_date(name: str, capsys: Capture) -> None:
    published = ROOT / "schemas" / f"{name.removesuffix('.yaml')}.schema.json"
    code, out, _ = run(capsys, name)
    assert code == 0
    assert out == published.read_text(), f"gate schema {name} > schemas/{published.name}"
    assert as_json(capsys, name)[1].items() >= json.loads(out).items()
    jsonschema.Draft202012Validator.check_schema(json.loads(out))


def files(folder: Path) -> dict[str, list[Path]]:
    """Write files that the gate reads, some in the format of version 1.0."""
    evidence = builders.evidence(
        runtimes=(
            builders.runtime_evidence(outputs=(builders.output_parity(max_abs_diff=float("nan")),)),
        )
    )
    decision = decide(builders.policy(), evidence, decided_at=evidence.measured_at)
    texts = {
        "evidence.json": evidence.to_json(),
        "decision.json": decision.to_json(),
        "summary.json": summarize(decision, evidence).to_json(),
        "gate.yaml": policy_text(Policy.default(), name="gate.yaml"),
        "quantized.yaml": policy_text(Policy.built_in("quantized"), name="quantized.yaml"),
        "short.yaml": "task: tensors\n",
        "section.yaml": "train: {epochs: 2}\ngate: {min_samples: 64}\n",
        "release.yaml": RELEASE,
    }
    envelope = json.loads((GOLDEN / "attestation" / "evidence.dsse.json").read_text())
    texts["statement.json"] = base64.b64decode(envelope["payload"]).decode()
    for name, text in texts.items():
        (folder / name).write_text(text)
    policies = ("gate.yaml", "quantized.yaml", "short.yaml", "section.yaml")
    return {
        "gate.yaml": [*(folder / name for name in policies), ROOT / "params.yaml"],
        "release.yaml": [folder / "release.yaml"],
        "evidence": [folder / "evidence.json", *GOLDEN.glob("evidence-*.json")],
        "decision": [folder / "decision.json", GOLDEN / "decision-v1.json"],
        "summary": [folder / "summary.json"],
        "statement": [folder / "statement.json"],
    }


@pytest.mark.parametrize("name", NAMES)
def test_written_files_match_their_schema(name: str, tmp_path: Path) -> None:
    schema = ROOT / "schemas" / f"{name.removesuffix('.yaml')}.schema.json"
    valid = jsonschema.Draft202012Validator(json.loads(schema.read_text()))
    for path in files(tmp_path)[name]:
        text = path.read_text()
        value = YAML(typ="safe").load(text) if path.suffix == ".yaml" else json.loads(text)
        valid.validate(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gate.yaml", "gate: {tsk: auto}"),
        ("gate.yaml", "min_samples: 0"),
        ("gate.yaml", "gate: {confidence: 1.5}"),
        ("gate.yaml", "gate: {runtimes: {ort-cpu: {required: often, bounds: {}}}}"),
        ("gate.yaml", "gate: {runtimes: {ort-cpu: {bounds: {noise_ratio: -1}}}}"),
        ("release.yaml", "parts: {head: {file: head.onnx}}"),
        ("release.yaml", "chain: mine\nparts: {head: {file: head.onnx}}"),
        ("decision", "verdict: MAYBE"),
        ("statement", "_type: https://in-toto.io/Statement/v0.1"),
    ],
)
def test_refused_files_do_not_match_the_schema(name: str, text: str) -> None:
    value: Any = YAML(typ="safe").load(text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, schema_of(name))
