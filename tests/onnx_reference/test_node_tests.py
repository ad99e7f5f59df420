"""The interpreter of reference files passes onnx's own node tests."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

from benchmarks.onnx_reference import cases, compare

DIFFERENT_RESULTS = {
    # ONNX Runtime uses the lowest float32 where onnx's masks have -inf.
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
}

RANDOM_OPERATORS = {
    # The interpreter rejects operators that draw random numbers.
    "test_training_dropout",
    "test_training_dropout_default",
    "test_training_dropout_default_mask",
    "test_training_dropout_mask",
}


@pytest.mark.further
def test_node_tests_are_computed_as_onnx_runtime_computes_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = {name: compare(model, inputs) for name, model, inputs in cases()}
    outcomes = Counter(outcome for outcome, _ in results.values())
    assert outcomes["passed"] > 1000
    wrong = {name: why for name, why in results.items() if why[0] in ("differs", "fails")}
    assert wrong.keys() <= DIFFERENT_RESULTS | RANDOM_OPERATORS, wrong
