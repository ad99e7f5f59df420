from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gate.parity.determinism import _LEVELS, deterministic
from gate.policy import DeterminismPolicy


def state():
    """Everything that a caller could notice."""
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
        "torch": torch.random.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
    }


def as_it_is():
    pass


def legacy_flags():
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = True


def medium():
    torch.set_float32_matmul_precision("medium")


def general_precision():
    torch.backends.fp32_precision = "tf32"


def backend_precision():
    torch.backends.cudnn.fp32_precision = "tf32"
    torch.backends.mkldnn.set_flags(_fp32_precision="bf16")


def mixed():
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def cudnn():
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False


CALLERS = [as_it_is, legacy_flags, medium, general_precision, backend_precision, mixed, cudnn]


@pytest.fixture(autouse=True)
def _same_process_afterwards():
    threads = torch.get_num_threads()
    yield
    for level in _LEVELS:
        torch._C._set_fp32_precision_setter(*level, "none")
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.set_num_threads(threads)


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("tf32", [False, True])
def test_switches_are_set_read_back_and_restored(caller, tf32):
    caller()
    before = state()
    policy = DeterminismPolicy(tf32=tf32, cudnn_benchmark=tf32, seed=7)
    with deterministic(policy) as seen:
        assert seen.tf32_matmul is tf32
        assert seen.tf32_cudnn is tf32
        assert seen.cudnn_deterministic is True
        assert seen.cudnn_benchmark is tf32
        assert (seen.grad, seen.seed) == (False, 7)
        assert seen.threads == torch.get_num_threads()
        assert not torch.is_grad_enabled()
        for operation in ("matmul", "conv", "rnn"):
            assert torch._C._get_fp32_precision_getter("mkldnn", operation) == "ieee"
        if caller not in (mixed, general_precision, backend_precision):
            # Library code may still read and set the flags without a contradiction.
            with torch.backends.cudnn.flags(enabled=True):
                pass
        torch.rand(3), random.random(), np.random.rand()
    assert state() == before


@pytest.mark.parametrize("caller", CALLERS)
def test_switches_are_restored_after_an_error(caller):
    caller()
    before = state()
    with pytest.raises(KeyboardInterrupt), deterministic(DeterminismPolicy()):
        raise KeyboardInterrupt
    assert state() == before


def test_general_precision_is_still_inherited_afterwards():
    torch.backends.fp32_precision = "tf32"
    with deterministic(DeterminismPolicy()):
        pass
    torch.backends.fp32_precision = "none"
    assert torch._C._get_fp32_precision_getter("mkldnn", "conv") == "none"


def test_autocast_of_the_caller_is_off_inside():
    with torch.autocast("cpu", dtype=torch.bfloat16), deterministic(DeterminismPolicy()):
        product = torch.ones(4, 4) @ torch.ones(4, 4)
        assert product.dtype == torch.float32


def test_the_seed_makes_runs_equal():
    drawn = []
    for _ in range(2):
        with deterministic(DeterminismPolicy(seed=3)):
            drawn.append((torch.rand(2).tolist(), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]
