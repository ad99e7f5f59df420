from __future__ import annotations

import math
from collections import Counter

import pytest
from prometheus_client import parser as older
from prometheus_client.openmetrics import parser

from gate.report.ci_formats import CiResult, openmetrics_text
from tests.report.ci_results import RESULTS
from tests.report.samples import HOSTILE

Series = tuple[str, frozenset[tuple[str, str]]]


def series(text: str) -> dict[Series, float]:
    """What Prometheus reads, each once."""
    families = list(parser.text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    keys = Counter((sample.name, frozenset(sample.labels.items())) for sample in samples)
    assert {family.type for family in families} == {"gauge"}
    assert {key: count for key, count in keys.items() if count > 1} == {}
    return {(s.name, frozenset(s.labels.items())): s.value for s in samples}


def value(result: CiResult, name: str, **labels: str) -> float:
    given = labels.items()
    (found,) = (
        number
        for (title, pairs), number in series(openmetrics_text(result)).items()
        if title == f"parity_gate_{name}" and given <= dict(pairs).items()
    )
    return found


@pytest.mark.parametrize("name", RESULTS)
def test_prometheus_reads_it_old_and_new(name: str) -> None:
    text = openmetrics_text(RESULTS[name]())
    assert text.endswith("\n# EOF\n")
    found = series(text)
    before = [s for family in older.text_string_to_metric_families(text) for s in family.samples]
    assert {(s.name, frozenset(s.labels.items())) for s in before} == found.keys()


@pytest.mark.parametrize("name", RESULTS)
def test_the_verdict_and_the_exit_code(name: str) -> None:
    result = RESULTS[name]()
    assert value(result, "exit_code", command=result.command) == result.exit_code
    for verdict in ("PASS", "FAIL", "ERROR"):
        assert value(result, "verdict", verdict=verdict) == (result.verdict == verdict)


def test_runtimes_and_checks_have_their_numbers() -> None:
    result = RESULTS["rejected"]()
    check = {"runtime": "ort-cpu", "output": "logits", "check": "noise_ratio"}
    assert value(result, "check_observed", **check) == pytest.approx(34)
    assert value(result, "check_bound", **check) == pytest.approx(3.3354, abs=1e-4)
    assert value(result, "check_used_ratio", **check) == pytest.approx(34 / 3.3354, rel=1e-4)
    assert value(result, "runtime_passed", runtime="ort-cpu") == 0
    assert value(RESULTS["passed"](), "runtime_passed", runtime="ort-cpu") == 1
    assert value(result, "top1_agreement_ratio", runtime="ort-cpu") == 1
    assert value(result, "batch_latency_seconds", runtime="ort-cpu") == pytest.approx(0.020)
    assert value(result, "checks", runtime="ort-cpu", verdict="FAIL") == 15
    assert value(result, "samples") == 400
    assert value(result, "decided_timestamp_seconds") == 1772644500


def test_nan_and_names_that_attack() -> None:
    result = RESULTS["hostile"]()
    found = series(openmetrics_text(result))
    assert any(math.isnan(number) for number in found.values())
    models = {dict(pairs)["model"] for _, pairs in found}
    assert models == {HOSTILE.replace("\x1b", "�").replace("\n", " ")}


def test_of_equal_checks_the_one_that_does_not_hold_is_shown() -> None:
    check = {"runtime": "ort-cpu", "output": "logits", "check": "noise_ratio"}
    assert value(RESULTS["twice"](), "check_observed", **check) == pytest.approx(34)


def test_each_part_of_a_release_has_its_own_series() -> None:
    check = {"runtime": "ort-cpu", "output": "logits", "check": "noise_ratio"}
    for part in ("encoder", "decoder"):
        assert value(RESULTS["parts"](), "check_observed", part=part, **check) == pytest.approx(34)
