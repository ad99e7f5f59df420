import pytest
from pydantic import ValidationError

from gate.policy import Bounds, Instruments, Policy, RuntimePolicy
from gate.runtime import RUNTIMES
from tests import builders


def runtime(**bounds):
    return RuntimePolicy(required="always", bounds=Bounds(**bounds))


def test_the_default_asks_for_cpu_always_and_cuda_when_present():
    for task in ("classification", "tensors"):
        policy = Policy.default(task=task)
        asked = {name: r.required for name, r in policy.runtimes.items()}
        assert asked == {
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
            "it never runs the file",
        ),
        ({"min_samples": 1}, "greater than or equal to 2"),
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
    ],
)  # fmt: skip
def test_a_policy_that_could_not_refuse_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        builders.policy(**fields)


def test_a_reduced_policy_may_lean_on_agreement():
    runtimes = {"ort-cpu": runtime(top1_agreement=0.99)}
    assert builders.policy(precision="reduced", runtimes=runtimes).precision == "reduced"


def test_one_sample_has_no_other_batch():
    with pytest.raises(ValidationError, match="0 or 2 and more"):
        Instruments(stability_samples=1)


def test_the_digest_changes_with_every_field():
    base = builders.policy()
    assert builders.policy().digest() == base.digest()
    for change in ({"min_samples": 301}, {"confidence": 0.99}, {"logits": ("logits",)}):
        assert builders.policy(**change).digest() != base.digest()


def test_provider_options_are_text():
    options = builders.policy().cuda_provider.provider_options(tf32=False)
    assert options == {
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kNextPowerOfTwo",
        "do_copy_in_default_stream": "1",
        "use_tf32": "0",
    }
