import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from gate.errors import PolicyError
from gate.policy.policy import Policy
from gate.policy.sections import (
    Bounds,
    ChampionPolicy,
    ConfidenceBands,
    Instruments,
    PreprocessingPolicy,
    RuntimePolicy,
)
from gate.records.runtime import RUNTIMES
from gate.summary.policy_docs import policy_text
from tests import builders


def runtime(**bounds):
    return RuntimePolicy(required="always", bounds=Bounds(**bounds))


def test_default_requires_cpu_always_and_cuda_when_present():
    for task in ("classification", "tensors"):
        policy = Policy.default(task=task)
        settings = {name: r.required for name, r in policy.runtimes.items()}
        assert settings == {
            name: "when_present" if traits.cuda else "always" for name, traits in RUNTIMES.items()
        }
        assert all(not r.bounds.empty for r in policy.runtimes.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"runtimes": {}}, "at least 1"),
        ({"runtimes": {"ort-cpu": runtime(top1_agreement=1.0)}}, "needs a bound noise_ratio"),
        ({"runtimes": {"ort-cpu": runtime(max_abs_diff=1.0)}}, "needs a bound top1_agreement"),
        (
            {"task": "tensors", "runtimes": {"ort-cpu": runtime(max_abs_diff=1.0, top5_agreement=1.0)}},
            "top5_agreement need logits",
        ),
        (
            {"runtimes": {"torch-cuda": runtime(max_abs_diff=1.0, top1_agreement=1.0)}},
            "which never runs the file",
        ),
        ({"min_samples": 0}, "greater than or equal to 1"),
        ({"determinism": {"seed": 10**20}}, "less than"),  # torch.manual_seed rejects it
        ({"precision": "sloppy"}, "precision"),
        ({"instruments": Instruments(noise_samples=0)}, "noise needs instruments.noise_samples"),
        ({"instruments": Instruments(stability_samples=0)}, "needs instruments.stability_samples"),
        (
            {
                "instruments": Instruments.none(),
                "runtimes": {"ort-cpu": runtime(noise_ratio=0.0, max_abs_diff=1.0, top1_agreement=1.0)},
            },
            "noise needs instruments.noise_samples",
        ),
        (
            {
                "waive": ("noise_ratio",),
                "runtimes": {"ort-cpu": runtime(noise_ratio=3.0, top1_agreement=1.0)},
            },
            r"noise_ratio \(not waived\)",
        ),
        ({"waive": ("max_abs_diff",)}, "noise_ratio"),
        ({"outputs": {"logits": "lottery"}}, "outputs.logits"),
        ({"outputs": {"y": "tensor"}, "logits": ("y",)}, "keep only one of them"),
        (
            {
                "task": "tensors",
                "outputs": {"y": "probabilities"},
                "runtimes": {"ort-cpu": runtime(max_abs_diff=1.0)},
            },
            "task 'tensors' has no classes",
        ),
        ({"task": "auto"}, "an inferred role is not enough"),
        (
            {
                "task": "auto",
                "outputs": {"y": "logits"},
                "runtimes": {"ort-cpu": runtime(noise_ratio=1.5)},
            },
            "the role of logits needs a bound top1_agreement",
        ),
        ({"nonfinite": "anything"}, "nonfinite"),
    ],
)  # fmt: skip
def test_policy_that_cannot_fail_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        builders.policy(**fields)


def test_with_answers_sets_roles_and_task():
    policy = Policy.default()
    assert policy.task == "auto"
    stated = policy.with_answers(outputs={"y": "logits"}, task="classification")
    assert (stated.task, stated.outputs) == ("classification", {"y": "logits"})
    assert stated.digest() != policy.digest()
    assert stated.with_answers(outputs={"y": "tensor"}).outputs == {"y": "tensor"}
    assert policy.with_answers(outputs={}) == policy
    with pytest.raises(PolicyError, match="'tensors' has no classes"):
        policy.with_answers(outputs={"y": "logits"}, task="tensors")


@pytest.mark.parametrize(
    ("fields", "name", "role", "counts"),
    [
        ({}, "y", None, True),
        ({"task": "auto", "logits": ("y",)}, "y", "logits", True),
        ({"logits": ("y",)}, "x", None, False),
        ({"outputs": {"y": "probabilities"}}, "y", "probabilities", True),
        ({"outputs": {"y": "embedding"}}, "y", "embedding", False),
        ({"outputs": {"y": "embedding"}}, "x", None, True),
    ],
)
def test_role_for_and_counts_classes(fields, name, role, counts):
    policy = builders.policy(**fields)
    assert (policy.role_for(name), policy.counts_classes(name)) == (role, counts)
    assert not Policy.default(task="tensors").counts_classes(name)


def test_unset_later_fields_are_not_serialized():
    plain = builders.policy().to_plain()
    assert not {"outputs", "nonfinite"} & set(plain)
    assert "cosine_distance" not in plain["runtimes"]["ort-cpu"]["bounds"]
    assert plain["task"] == "classification"


def test_reduced_policy_needs_only_agreement():
    runtimes = {"ort-cpu": runtime(top1_agreement=0.99)}
    assert builders.policy(precision="reduced", runtimes=runtimes).precision == "reduced"


@pytest.mark.parametrize("task", ["auto", "classification", "tensors"])
def test_built_in_reduced_policy_scales_noise_bounds_to_16_bits(task):
    exact, reduced = Policy.default(task=task), Policy.built_in("reduced", task=task)
    assert (reduced.precision, reduced.task) == ("reduced", task)
    assert reduced.runtimes.keys() == exact.runtimes.keys()
    for name, runtime in reduced.runtimes.items():
        assert runtime.required == exact.runtimes[name].required
        assert runtime.bounds.noise_ratio == 2**13 * exact.runtimes["ort-cpu"].bounds.noise_ratio
        assert (runtime.bounds.top1_agreement is None) is (task != "classification")


BANDS = ConfidenceBands(over_1_percent=1.0, over_5_percent=0.1, over_10_percent=0.1)


def quantized(**overrides):
    bounds = runtime(top1_agreement=0.99, confidence_bands=BANDS)
    fields = {"precision": "quantized", "runtimes": {"ort-cpu": bounds}, **overrides}
    return Policy(**fields)


@pytest.mark.parametrize(
    "field",
    ["max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_logits", "noise_ratio", "noise_peak",
     "noise_diff"],
)  # fmt: skip
def test_quantized_policy_refuses_exact_tolerances(field):
    bounds = runtime(top1_agreement=0.99, confidence_bands=BANDS, **{field: 1.0})
    with pytest.raises(ValidationError, match=f"{field} are for exact files"):
        quantized(runtimes={"ort-cpu": bounds})


def test_quantized_policy_needs_agreement_and_confidence_bounds():
    assert Policy.quantized().precision == "quantized"
    with pytest.raises(ValidationError, match="needs a bound confidence_bands"):
        quantized(runtimes={"ort-cpu": runtime(top1_agreement=0.99)})
    with pytest.raises(ValidationError, match="needs a bound top1_agreement"):
        quantized(runtimes={"ort-cpu": runtime(confidence_bands=BANDS)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"twin": builders.policy()}, "only the twin may be quantized"),
        ({"twin": quantized(), "precision": "quantized"}, "are for exact files|only the twin may"),
    ],
)  # fmt: skip
def test_twin_must_be_quantized(fields, message):
    with pytest.raises(ValidationError, match=message):
        builders.policy(**fields)


def test_twin_has_same_task_and_no_twin():
    with pytest.raises(ValidationError, match="only the twin may be quantized"):
        quantized(twin=quantized())
    with pytest.raises(ValidationError, match="the twin's task is 'tensors'"):
        builders.policy(
            twin=quantized(task="tensors", runtimes={"ort-cpu": runtime(scaled_diff=0.1)})
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"review": "required"}, "set them outside twin"),
        ({"promotion": "by_service"}, "set it outside twin"),
        ({"max_age_days": 3.0}, "set them outside twin"),
        ({"preprocessing": PreprocessingPolicy(consumers=("torchvision",))}, "set preprocessing outside"),
    ],
)  # fmt: skip
def test_twin_refuses_fields_that_apply_to_both(fields, message):
    with pytest.raises(ValidationError, match=message):
        builders.policy(twin=quantized(**fields))


def test_twin_changes_the_policy_digest():
    digests = {
        builders.policy(twin=twin).digest()
        for twin in (None, quantized(), quantized(min_samples=300))
    }
    assert len(digests) == 3


def test_stability_needs_more_than_one_sample():
    with pytest.raises(ValidationError, match="set 0 or 2"):
        Instruments(stability_samples=1)


def test_digest_changes_with_each_field():
    base = builders.policy()
    assert builders.policy().digest() == base.digest()
    for change in ({"min_samples": 301}, {"confidence": 0.99}, {"logits": ("logits",)}):
        assert builders.policy(**change).digest() != base.digest()


def test_provider_options_are_strings():
    options = builders.policy().cuda_provider.provider_options(tf32=False)
    assert options == {
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kNextPowerOfTwo",
        "do_copy_in_default_stream": "1",
        "use_tf32": "0",
    }


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "no bound is set"),
        ({"first_release": "refuse"}, "no bound is set"),
        ({"max_accuracy_drop": -0.1}, "greater than or equal to 0"),
        ({"min_agreement": 1.1}, "less than or equal to 1"),
        ({"max_latency_ratio": 0.0}, "greater than 0"),
        ({"max_latency_ratio": math.nan}, "finite number"),
        ({"min_agreement": 0.9, "first_release": "maybe"}, "'allow' or 'refuse'"),
        ({"min_agreement": 0.9, "more": 1}, "Extra inputs"),
    ],
)
def test_invalid_incumbent_section_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(incumbent=ChampionPolicy(**section), runtimes=Policy.default().runtimes)


def test_incumbent_bounds_need_matching_task() -> None:
    answers = ChampionPolicy(min_agreement=0.9)
    tensors = builders.policy().model_copy(update={"task": "tensors"}).runtimes
    bounds = Bounds(max_abs_diff=1e-4)
    runtimes = {name: RuntimePolicy(required="always", bounds=bounds) for name in tensors}
    with pytest.raises(ValueError, match="need classes"):
        Policy(task="tensors", runtimes=runtimes, incumbent=answers)
    Policy(task="tensors", runtimes=runtimes, incumbent=ChampionPolicy(max_latency_ratio=2.0))
    twin = Policy.quantized().model_copy(update={"incumbent": answers})
    with pytest.raises(ValueError, match="incumbent apply to both"):
        builders.policy(twin=twin)


def test_promotion_is_serialized_only_when_not_default():
    """Otherwise the digests of older policies would change."""
    assert "promotion" not in builders.policy().to_plain()
    assert builders.policy(promotion="by_service").to_plain()["promotion"] == "by_service"
    with pytest.raises(ValidationError, match="direct"):
        builders.policy(promotion="by_nobody")


@pytest.mark.parametrize("precision", ["exact", "reduced", "quantized"])
def test_missing_section_keeps_its_default(tmp_path: Path, precision) -> None:
    built_in = Policy.built_in(precision, task="classification")
    written = yaml.safe_load(policy_text(built_in, name="gate.yaml"))["gate"]
    path = tmp_path / "gate.yaml"
    for name in set(written) - {"precision"}:
        remaining_fields = {key: value for key, value in written.items() if key != name}
        path.write_text(yaml.safe_dump({"gate": remaining_fields}))
        assert Policy.from_file(path) == built_in, name
    for name in written["instruments"]:
        remaining_fields = {
            key: value for key, value in written["instruments"].items() if key != name
        }
        path.write_text(yaml.safe_dump({**written, "instruments": remaining_fields}))
        assert Policy.from_file(path) == built_in, name


def test_twin_without_runtimes_uses_quantized_defaults(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text("task: classification\ntwin: {precision: quantized, task: classification}\n")
    twin = Policy.from_file(path).twin
    assert twin is not None
    assert twin.runtimes == Policy.quantized().runtimes


def test_stated_runtimes_replace_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(
        "task: tensors\nruntimes: {ort-cpu: {required: always, bounds: {noise_ratio: 2}}}\n"
    )
    assert set(Policy.from_file(path).runtimes) == {"ort-cpu"}


def test_only_parts_of_quantized_release_are_checked_in_chain():
    exact, twin = builders.policy(), quantized(logits=("answers",))
    for policy in (exact, twin, exact.for_part(["voxels"])):
        assert policy.judges("voxels")
        assert policy.bounds_for("ort-cpu", "voxels") == policy.runtimes["ort-cpu"].bounds
    part = twin.for_part(["voxels", "answers"])
    assert not part.judges("voxels")
    assert part.bounds_for("ort-cpu", "voxels") == Bounds()
    assert part.bounds_for("ort-cpu", "answers") == part.runtimes["ort-cpu"].bounds
    assert not part.counts_classes("voxels")
    assert part.counts_classes("answers")


def test_checked_in_chain_cannot_be_set_in_a_file():
    tensors = quantized(task="tensors", runtimes={"ort-cpu": runtime(scaled_diff=0.1)})
    part = tensors.for_part(["voxels"])
    assert not part.judges("voxels")
    assert Policy.from_json(part.to_json()).judges("voxels")
    with pytest.raises(ValidationError):
        Policy.model_validate({**quantized().model_dump(), "_judged_in_chain": True})
