"""The environment is recorded; determinism switches are set and restored."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
import torch._inductor.config
from hypothesis import given, settings
from hypothesis import strategies as st

from gate import MeasurementJob
from gate.api import measure_job
from gate.policy.sections import DeterminismPolicy, Instruments
from gate.records.evidence import Determinism
from gate.reference import environment
from gate.reference.environment import _LEVELS, cublas_reason, deterministic
from tests.measure import tiny

SWITCHES = Determinism(
    tf32_matmul=False,
    tf32_cudnn=False,
    cudnn_deterministic=True,
    cudnn_benchmark=False,
    grad=False,
    seed=0,
    threads=2,
)


def test_environment_has_versions_and_cpu():
    observed = environment.describe_environment(SWITCHES)
    assert observed.versions["torch"] == torch.__version__
    assert {"python", "torch", "torchvision", "onnx", "onnxruntime", "numpy"} <= set(
        observed.versions
    )
    assert observed.cpu
    assert observed.determinism == SWITCHES


def read_state():
    """Return all global state that a caller could observe."""
    flags = []
    for read in (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        torch.get_float32_matmul_precision,
    ):
        try:
            flags.append(read())
        except RuntimeError:
            flags.append("contradiction")
    return {
        "flags": flags,
        "precisions": [torch._C._get_fp32_precision_getter(*level) for level in _LEVELS],
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch._inductor.config.deterministic,
        ),
        "dtype": torch.get_default_dtype(),
        "attention": torch.backends.mha.get_fastpath_enabled(),
        "environment": dict(os.environ),
        "torch": torch.random.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
    }


def change_nothing():
    pass


def set_legacy_flags():
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = True


def set_medium_precision():
    torch.set_float32_matmul_precision("medium")


def set_general_precision():
    torch.backends.fp32_precision = "tf32"


def set_backend_precision():
    torch.backends.cudnn.fp32_precision = "tf32"
    torch.backends.mkldnn.set_flags(_fp32_precision="bf16")


def set_mixed_precision():
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def set_cudnn():
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False


def set_warn_only():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def set_strict():
    torch.use_deterministic_algorithms(True)


def set_off_with_warn_only():
    torch.use_deterministic_algorithms(False, warn_only=True)


def set_compiler():
    torch._inductor.config.deterministic = True


def set_single_thread():
    torch.set_num_threads(1)


CALLERS = [
    change_nothing, set_legacy_flags, set_medium_precision, set_general_precision, set_backend_precision, set_mixed_precision, set_cudnn, set_warn_only,
    set_strict, set_off_with_warn_only, set_compiler, set_single_thread,
]  # fmt: skip


@pytest.fixture(autouse=True)
def restore_switches():
    threads = torch.get_num_threads()
    yield
    for level in _LEVELS:
        torch._C._set_fp32_precision_setter(*level, "none")
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch._inductor.config.deterministic = False
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize(
    "caller", [change_nothing, set_legacy_flags, set_mixed_precision, set_general_precision]
)
@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_and_cudnn_switches_are_set_and_restored(caller, tf32):
    caller()
    before = read_state()
    policy = DeterminismPolicy(tf32=tf32, cudnn_benchmark=tf32, seed=7)
    with deterministic(policy) as observed:
        assert observed.tf32_matmul is tf32
        assert observed.tf32_cudnn is tf32
        assert observed.cudnn_deterministic is True
        assert observed.cudnn_benchmark is tf32
        assert (observed.grad, observed.seed, observed.algorithms) == (False, 7, False)
        assert observed.threads == torch.get_num_threads() == before["threads"]
        assert not torch.is_grad_enabled()
        for operation in ("matmul", "conv", "rnn"):
            assert torch._C._get_fp32_precision_getter("mkldnn", operation) == "ieee"
        if caller not in (set_mixed_precision, set_general_precision, set_backend_precision):
            # Library code may still read and set the flags without a contradiction.
            with torch.backends.cudnn.flags(enabled=True):
                pass
        torch.rand(3), random.random(), np.random.rand()
    assert read_state() == before


def test_autocast_is_disabled_inside():
    with torch.autocast("cpu", dtype=torch.bfloat16), deterministic(DeterminismPolicy()):
        product = torch.ones(4, 4) @ torch.ones(4, 4)
        assert product.dtype == torch.float32


POLICIES = st.builds(
    DeterminismPolicy,
    tf32=st.booleans(),
    cudnn_deterministic=st.booleans(),
    cudnn_benchmark=st.booleans(),
    seed=st.integers(0, 2**40),
    threads=st.none() | st.integers(1, 4),
    algorithms=st.booleans(),
)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(CALLERS), max_size=3), st.lists(POLICIES, max_size=3), st.booleans()
)
def test_any_caller_state_is_restored(callers, policies, raises):
    """Restore the state for any nesting, whether the body raises or not."""
    for caller in callers:
        caller()
    before = read_state()

    def run_nested(policies):
        if not policies:
            torch.rand(2), random.random(), np.random.rand()
            if raises:
                raise KeyboardInterrupt
            return
        with deterministic(policies[0]) as observed:
            assert observed.algorithms is policies[0].algorithms
            assert observed.threads == (policies[0].threads or torch.get_num_threads())
            run_nested(policies[1:])

    if policies:
        try:
            run_nested(policies)
        except KeyboardInterrupt:
            assert raises
    assert read_state() == before


@pytest.mark.parametrize(("algorithms", "variable", "words"), [
    (False, None, None),
    (True, ":4096:8", None),
    (True, ":16:8", None),
    (True, None, "CUBLAS_WORKSPACE_CONFIG is not set"),
    (True, ":0:0", "CUBLAS_WORKSPACE_CONFIG is ':0:0'"),
])  # fmt: skip
def test_deterministic_cublas_needs_its_environment_variable(
    monkeypatch, algorithms, variable, words
):
    if variable is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", variable)
    reason = cublas_reason(DeterminismPolicy(algorithms=algorithms))
    assert (words in reason and ":4096:8" in reason) if words else reason is None


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return tiny.export(tiny.net(), tmp_path_factory.mktemp("determinism") / "model.onnx")


class Interrupted(Exception):
    pass


def read_caller_state(model):
    """Return the state of the caller and of its model."""
    return (
        read_state(),
        [module.training for module in model.modules()],
        [(p.requires_grad, p.dtype, p.grad is None) for p in model.parameters()],
        {name: value.tolist() for name, value in model.state_dict().items()},
        [len(module._forward_hooks) for module in model.modules()],
    )


@pytest.mark.parametrize(("callers", "raises"), [
    ([set_general_precision, set_strict], False),
    ([set_legacy_flags, set_warn_only, set_cudnn, set_single_thread], True),
])  # fmt: skip
def test_measuring_restores_the_caller_state(exported, callers, raises):
    """Restore the train mode of the model, gradients, switches and random states."""
    model = tiny.net().train()
    model.norm.eval()
    model.conv.weight.requires_grad_(False)
    for caller in callers:
        caller()
    torch.manual_seed(11), random.seed(12), np.random.seed(13)
    torch.rand(1), random.random(), np.random.rand()
    policy = tiny.policy(
        "ort-cpu",
        "ort-cpu-optimized",
        instruments=Instruments(graph=True, probes=True, search_inputs=8),
        determinism=DeterminismPolicy(threads=2, algorithms=True, seed=5),
    )
    calls = []

    def progress(done, total):
        calls.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        if raises:
            raise Interrupted

    before = read_caller_state(model)
    assert torch.is_grad_enabled()
    try:
        measure_job(
            MeasurementJob(model, exported, tiny.samples(8), policy=policy), progress=progress
        )
    except Interrupted:
        assert raises
    assert read_caller_state(model) == before
    assert set(calls) == {(2, True)}


@pytest.mark.parametrize(("threads", "algorithms"), [(1, True), (3, False)])
def test_both_sides_use_the_determinism_of_the_policy(exported, threads, algorithms):
    custom_policy = DeterminismPolicy(threads=threads, algorithms=algorithms)
    policy = tiny.policy(instruments=Instruments.none(), determinism=custom_policy)
    observed = measure_job(MeasurementJob(tiny.net(), exported, tiny.samples(4), policy=policy))
    switches = observed.environment.determinism
    assert (switches.threads, switches.algorithms) == (threads, algorithms)
    options = observed.runtimes[0].session_options
    assert options["intra_op_num_threads"] == str(threads)
    assert options["use_deterministic_compute"] == str(int(algorithms))
