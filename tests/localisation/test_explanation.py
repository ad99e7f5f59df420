"""After a rejection the layers are compared: on the right runtime and samples, and never harmfully."""

from __future__ import annotations

import numpy as np
import pytest

from gate.decision.decision import Decision, decide
from gate.localisation import explanation
from gate.localisation.explanation import Case, explain
from gate.onnxfile.candidate import Candidate
from gate.records.evidence import Evidence, TensorSpec
from gate.records.localisation import Explanation, Localisation
from tests import builders
from tests.builders import absent, digest, output_parity, runtime_evidence
from tests.parity import tiny


def judged(**runtimes: object) -> tuple[Evidence, Decision]:
    """Evidence in which `ort-cpu` or `ort-cpu-optimized` are as given."""
    names = {"cpu": "ort-cpu", "optimized": "ort-cpu-optimized"}
    given = {names[key]: value for key, value in runtimes.items()}
    good = builders.evidence()
    evidence = good.model_copy(
        update={"runtimes": tuple(given.get(r.runtime, r) for r in good.runtimes)}
    )
    return evidence, decide(builders.policy(), evidence, decided_at="now")


def bad(name, *, sample: int | None = 3):
    return runtime_evidence(
        name, outputs=(output_parity(max_abs_diff=1.0, max_abs_diff_sample=sample),)
    )


@pytest.fixture
def case(tmp_path):
    model = tiny.net()
    candidate = tiny.export(model, tmp_path / "m.onnx")
    return Case(model, candidate, tiny.samples(20), builders.policy())


@pytest.fixture
def asked(monkeypatch):
    """What `locate` is asked for; it finds nothing."""
    calls = []

    def locate(case, *, runtime, limit, refused):
        assert runtime in refused
        calls.append((runtime, next(case.samples.batches(limit))["input"]))
        return Localisation(
            subject_sha256=digest("m"), runtime=runtime, samples=limit, layers=(),
            first_divergence=None, cause="",
        )  # fmt: skip

    monkeypatch.setattr(explanation, "locate", locate)
    return calls


def test_a_pass_is_not_explained(case, asked):
    assert explain(case, *judged()) == Explanation()
    assert asked == []


@pytest.mark.parametrize(
    "runtime",
    [absent("ort-cpu"), runtime_evidence("ort-cpu", outputs=(), failure="out of memory"),
     runtime_evidence("ort-cpu", providers_active=("CUDAExecutionProvider",))],
    ids=["absent", "failed", "wrong provider"],
)  # fmt: skip
def test_what_is_no_wrong_number_is_not_explained(case, asked, runtime):
    evidence, decision = judged(cpu=runtime)
    assert not decision.passed
    assert explain(case, evidence, decision) == Explanation()
    assert asked == []


BREAKS = {"outputs": (), "failure": "no kernel"}


@pytest.mark.parametrize("optimiser", [True, False])
def test_what_breaks_with_optimisations_on_only_is_explained_by_the_optimiser(
    case, asked, monkeypatch, optimiser
):
    real = explanation.locate
    monkeypatch.setattr(
        explanation, "locate",
        lambda *given, **options: real(*given, **options).model_copy(
            update={"optimiser": optimiser}
        ),
    )  # fmt: skip
    broken = runtime_evidence("ort-cpu-optimized", **BREAKS)
    told = explain(case, *judged(optimized=broken))
    assert [runtime for runtime, _ in asked] == ["ort-cpu-optimized"]
    assert (told.localisation is not None) is optimiser
    assert told.failure is None


def test_what_breaks_with_optimisations_off_too_is_not_explained(case, asked):
    broken = {
        "cpu": runtime_evidence("ort-cpu", **BREAKS),
        "optimized": runtime_evidence("ort-cpu-optimized", **BREAKS),
    }
    assert explain(case, *judged(**broken)) == Explanation()
    assert asked == []


def test_where_the_layers_of_what_breaks_can_not_be_compared_nothing_is_added(case, monkeypatch):
    def locate(*_, **__):
        raise RuntimeError("no room")

    monkeypatch.setattr(explanation, "locate", locate)
    broken = runtime_evidence("ort-cpu-optimized", **BREAKS)
    assert explain(case, *judged(optimized=broken)) == Explanation()


@pytest.mark.parametrize(
    ("runtimes", "first"),
    [({"cpu": bad("ort-cpu"), "optimized": bad("ort-cpu-optimized")}, "ort-cpu"),
     ({"optimized": bad("ort-cpu-optimized")}, "ort-cpu-optimized")],
)  # fmt: skip
def test_the_first_runtime_that_failed_is_explained(case, asked, runtimes, first):
    assert explain(case, *judged(**runtimes)).localisation is not None
    assert [runtime for runtime, _ in asked] == [first]


@pytest.mark.parametrize(
    ("sample", "places"),
    [(3, [3, 0, 1, 2, 4, 5, 6, 7]), (17, [17, 0, 1, 2, 3, 4, 5, 6]), (None, list(range(8)))],
)
def test_the_worst_sample_comes_first(case, asked, sample, places):
    explain(case, *judged(cpu=bad("ort-cpu", sample=sample)))
    np.testing.assert_array_equal(asked[0][1], tiny.images(20)[places])


def test_a_fixed_batch_is_taken_whole(case, asked):
    fixed = TensorSpec(name="input", dtype="float32", shape=(5, 3, 8, 8))
    subject = case.candidate.subject.model_copy(update={"inputs": (fixed,)})
    whole = Case(case.model, Candidate(case.candidate.path, subject), case.samples, case.policy)
    explain(whole, *judged(cpu=bad("ort-cpu", sample=12)))
    np.testing.assert_array_equal(asked[0][1], tiny.images(20)[10:15])


def test_what_breaks_is_told_and_not_raised(case, monkeypatch):
    def locate(*_, **__):
        raise RuntimeError("no room")

    monkeypatch.setattr(explanation, "locate", locate)
    told = explain(case, *judged(cpu=bad("ort-cpu")))
    assert told == Explanation(failure="RuntimeError: no room")
