"""Operators of com.microsoft and ai.onnx.ml equal those of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from gate.reference.onnx_operators import from_numpy, to_numpy
from gate.reference.onnx_reference import OnnxReference, open_plain

Array = np.ndarray[Any, Any]

MS, ML = "com.microsoft", "ai.onnx.ml"


class Inputs:
    """Random inputs with a new generator for each row, so that rows are independent."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)

    def f(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def u8(self, *shape: int) -> Array:
        return self.random.integers(0, 256, shape).astype(np.uint8)

    def i8(self, *shape: int) -> Array:
        return self.random.integers(-128, 128, shape).astype(np.int8)


def s(value: float) -> Array:
    return np.array(value, np.float32)


def z(value: int) -> Array:
    return np.array(value, np.uint8)


def n(*values: int) -> Array:
    return np.array(values, np.int32)


def trees(kind: str, **more: Any) -> dict[str, Any]:
    """Return the attributes of two trees with three nodes each."""
    attributes: dict[str, Any] = {
        "nodes_treeids": [0, 0, 0, 1, 1, 1], "nodes_nodeids": [0, 1, 2, 0, 1, 2],
        "nodes_featureids": [0, 0, 0, 2, 0, 0], "nodes_values": [0.1, 0, 0, -0.3, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF", "BRANCH_GT", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0, 1, 0, 0], "nodes_falsenodeids": [2, 0, 0, 2, 0, 0],
        f"{kind}_treeids": [0, 0, 1, 1], f"{kind}_nodeids": [1, 2, 1, 2],
    }  # fmt: skip
    return attributes | more


Row = tuple[str, str, Callable[[Inputs], list[Array | None]], dict[str, Any], int]

ROWS: dict[str, Row] = {
    "gelu": (MS, "Gelu", lambda i: [i.f(3, 5)], {}, 1),
    "bias gelu": (MS, "BiasGelu", lambda i: [i.f(3, 5), i.f(5)], {}, 1),
    "fast gelu": (MS, "FastGelu", lambda i: [i.f(3, 5), i.f(5)], {}, 1),
    "quick gelu": (MS, "QuickGelu", lambda i: [i.f(3, 5)], {"alpha": 1.5}, 1),
    "squared distances": (MS, "CDist", lambda i: [i.f(4, 3), i.f(5, 3)], {}, 1),
    "distances": (MS, "CDist", lambda i: [i.f(4, 3), i.f(5, 3)], {"metric": "euclidean"}, 1),
    "fused product": (MS, "FusedMatMul", lambda i: [i.f(2, 4, 3), i.f(2, 5, 4)],
                      {"transA": 1, "transB": 1, "alpha": 0.5}, 1),
    "fused convolution": (MS, "FusedConv", lambda i: [i.f(1, 2, 5, 5), i.f(3, 2, 3, 3), i.f(3)],
                          {"activation": "LeakyRelu", "activation_params": [0.1],
                           "pads": [1, 1, 1, 1]}, 1),
    "fused gemm": (MS, "FusedGemm", lambda i: [i.f(2, 3), i.f(3, 4), i.f(4)],
                   {"activation": "Relu"}, 1),
    "skip layer norm": (MS, "SkipLayerNormalization",
                        lambda i: [i.f(1, 3, 8), i.f(1, 3, 8), i.f(8), i.f(8), i.f(8)],
                        {"epsilon": 1e-5}, 1),
    "skip rms norm": (MS, "SkipSimplifiedLayerNormalization",
                      lambda i: [i.f(1, 3, 8), i.f(1, 3, 8), i.f(8)], {"epsilon": 1e-5}, 1),
    "attention": (MS, "Attention", lambda i: [i.f(2, 3, 8), i.f(8, 24), i.f(24),
                                              np.array([3, 2], np.int32)], {"num_heads": 2}, 1),
    "causal attention": (MS, "Attention", lambda i: [i.f(2, 3, 8), i.f(8, 24), i.f(24)],
                         {"num_heads": 2, "unidirectional": 1}, 1),
    "multi-head attention": (MS, "MultiHeadAttention",
                             lambda i: [i.f(2, 3, 8), i.f(2, 4, 8), i.f(2, 4, 8), i.f(24)],
                             {"num_heads": 2}, 1),
    "embedding": (MS, "EmbedLayerNormalization",
                  lambda i: [np.array([[1, 2, 0]], np.int32), np.array([[0, 1, 1]], np.int32),
                             i.f(4, 8), i.f(3, 8), i.f(2, 8), i.f(8), i.f(8)],
                  {"epsilon": 1e-5}, 2),
    "rotary": (MS, "RotaryEmbedding",
               lambda i: [i.f(1, 3, 8), np.array([[0, 1, 2]]), i.f(4, 2), i.f(4, 2)],
               {"num_heads": 2}, 1),
    "causal attention of what is padded in front": (
        MS, "Attention",
        lambda i: [i.f(2, 3, 8), i.f(8, 24), i.f(24), np.array([3, 2, 0, 1], np.int32)],
        {"num_heads": 2, "unidirectional": 1}, 1),
    "grouped attention": (MS, "GroupQueryAttention",
                          lambda i: [i.f(2, 3, 32), i.f(2, 3, 16), i.f(2, 3, 16), None, None,
                                     n(2, 2), n(3)],
                          {"num_heads": 4, "kv_num_heads": 2}, 3),
    "grouped attention of padded samples": (
        MS, "GroupQueryAttention",
        lambda i: [i.f(2, 1, 32), i.f(2, 1, 16), i.f(2, 1, 16), i.f(2, 2, 5, 8), i.f(2, 2, 5, 8),
                   n(4, 2), n(5)],
        {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 3}, 3),
    "grouped attention that turns": (
        MS, "GroupQueryAttention",
        lambda i: [i.f(1, 1, 64), None, None, i.f(1, 1, 3, 16), i.f(1, 1, 3, 16), n(3), n(4),
                   i.f(6, 8), i.f(6, 8)],
        {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "softcap": 2.0}, 3),
    "quantized sum": (MS, "QLinearAdd", lambda i: [i.u8(2, 3), s(0.1), z(120), i.u8(2, 3), s(0.2),
                                                   z(100), s(0.25), z(128)], {}, 1),
    "quantized product": (MS, "QLinearMul", lambda i: [i.u8(2, 3), s(0.1), z(120), i.u8(2, 3),
                                                       s(0.2), z(100), s(1.5), z(128)], {}, 1),
    "quantized sigmoid": (MS, "QLinearSigmoid", lambda i: [i.u8(2, 3), s(0.03), z(120), s(0.004),
                                                           z(0)], {}, 1),
    "quantized leaky relu": (MS, "QLinearLeakyRelu", lambda i: [i.u8(2, 3), s(0.03), z(120),
                                                                s(0.02), z(90)], {}, 1),
    "quantized mean": (MS, "QLinearGlobalAveragePool", lambda i: [i.u8(1, 3, 4, 4), s(0.03), z(120),
                                                                  s(0.01), z(90)], {}, 1),
    "quantized join": (MS, "QLinearConcat", lambda i: [s(0.1), z(100), i.u8(2, 3), s(0.2), z(50),
                                                       i.u8(2, 3), s(0.05), z(20)], {"axis": 1}, 1),
    "quantized gemm": (MS, "QGemm", lambda i: [i.u8(2, 4), s(0.02), z(128), i.u8(4, 3), s(0.03),
                                               z(120), i.i8(3).astype(np.int32), s(0.1), z(100)],
                       {}, 1),
    "dynamic product": (MS, "DynamicQuantizeMatMul", lambda i: [i.f(2, 4), i.u8(4, 3), s(0.03),
                                                                z(120)], {}, 1),
    "integer product": (MS, "MatMulIntegerToFloat", lambda i: [i.u8(2, 4), i.u8(4, 3), s(0.02),
                                                               s(0.03), z(128), z(120), i.f(3)],
                        {}, 1),
    "four bits": (MS, "MatMulNBits", lambda i: [i.f(2, 32), i.u8(3, 2, 8), i.f(6)],
                  {"K": 32, "N": 3, "bits": 4, "block_size": 16}, 1),
    "scaler": (ML, "Scaler", lambda i: [i.f(4, 3)],
               {"offset": [0.1, 0.2, 0.3], "scale": [1.0, 2.0, 3.0]}, 1),
    "max normalizer": (ML, "Normalizer", lambda i: [i.f(4, 3)], {"norm": "MAX"}, 1),
    "l1 normalizer": (ML, "Normalizer", lambda i: [i.f(4, 3)], {"norm": "L1"}, 1),
    "l2 normalizer": (ML, "Normalizer", lambda i: [i.f(4, 3)], {"norm": "L2"}, 1),
    "linear regressor": (ML, "LinearRegressor", lambda i: [i.f(4, 3)],
                         {"coefficients": [0.1, -0.2, 0.3, 1.0, 2.0, 3.0], "intercepts": [0.5, 1.0],
                          "targets": 2}, 1),
    "linear classifier": (ML, "LinearClassifier", lambda i: [i.f(4, 3)],
                          {"coefficients": [0.1, -0.2, 0.3, 1.0, 2.0, 3.0, 0.5, 0.1, -0.9],
                           "intercepts": [0.5, 1.0, 0.1], "classlabels_ints": [7, 8, 9],
                           "post_transform": "SOFTMAX"}, 2),
    "binary linear classifier": (ML, "LinearClassifier", lambda i: [i.f(4, 3)],
                                 {"coefficients": [-0.1, 0.2, -0.3, 0.1, -0.2, 0.3],
                                  "intercepts": [-0.5, 0.5], "classlabels_strings": ["no", "yes"],
                                  "post_transform": "LOGISTIC"}, 2),
    "tree regressor": (ML, "TreeEnsembleRegressor", lambda i: [i.f(6, 3)],
                       trees("target", target_ids=[0, 0, 0, 0], n_targets=1, base_values=[0.5],
                             target_weights=[1.0, 2.0, -1.5, 0.25]), 1),
    "mean of trees": (ML, "TreeEnsembleRegressor", lambda i: [i.f(6, 3)],
                      trees("target", target_ids=[0, 0, 0, 0], n_targets=1,
                            aggregate_function="AVERAGE",
                            target_weights=[1.0, 2.0, -1.5, 0.25]), 1),
    "tree classifier": (ML, "TreeEnsembleClassifier", lambda i: [i.f(6, 3)],
                        trees("class", class_ids=[0, 1, 2, 1], classlabels_int64s=[5, 6, 7],
                              class_weights=[1.0, 0.5, 0.75, 0.25], post_transform="SOFTMAX"), 2),
    "boosted classifier": (ML, "TreeEnsembleClassifier", lambda i: [i.f(6, 3)],
                           trees("class", class_ids=[0, 0, 0, 0], classlabels_strings=["a", "b"],
                                 class_weights=[1.0, -0.5, 0.75, -0.25],
                                 post_transform="LOGISTIC"), 2),
    "forest of shares": (ML, "TreeEnsembleClassifier", lambda i: [i.f(6, 3)],
                         trees("class", class_ids=[0, 0, 0, 0], classlabels_int64s=[0, 1],
                               class_weights=[0.1, 0.5, 0.2, 0.4]), 2),
    "boosted classifier with two base values": (
        ML, "TreeEnsembleClassifier", lambda i: [i.f(6, 3)],
        trees("class", class_ids=[0, 0, 0, 0], classlabels_int64s=[3, 7], base_values=[0.2, -0.4],
              class_weights=[1.0, -0.5, 0.75, -0.25], post_transform="LOGISTIC"), 2),
    "forest of two classes": (
        ML, "TreeEnsembleClassifier", lambda i: [i.f(6, 3)],
        trees("class", class_ids=[0, 1, 0, 1], classlabels_int64s=[0, 1],
              class_weights=[0.9, 0.2, 0.3, 0.4]), 2),
    "leaves of both classes and two base values": (
        ML, "TreeEnsembleClassifier", lambda i: [i.f(6, 3)],
        trees("class", class_ids=[0, 1, 0, 1], classlabels_strings=["a", "b"],
              base_values=[0.3, 0.1], class_weights=[0.9, -0.2, 0.3, 0.4]), 2),
    "shares by a logistic function": (
        ML, "TreeEnsembleClassifier", lambda i: [i.f(6, 3)],
        trees("class", class_ids=[0, 0, 0, 0], classlabels_int64s=[0, 1], post_transform="LOGISTIC",
              class_weights=[0.1, 0.5, 0.2, 0.4]), 2),
    "weights in float64": (
        ML, "TreeEnsembleClassifier", lambda i: [i.f(6, 3).astype(np.float64)],
        trees("class", class_ids=[0, 0, 0, 0], classlabels_int64s=[0, 1], class_weights=None,
              class_weights_as_tensor=helper.make_tensor("w", TensorProto.DOUBLE, [4],
                                                         [1.0, -0.5, 0.75, -0.25])), 2),
    "a single target is not transformed": (
        ML, "TreeEnsembleRegressor", lambda i: [i.f(6, 3)],
        trees("target", target_ids=[0, 0, 0, 0], n_targets=1, post_transform="LOGISTIC",
              target_weights=[1.0, 2.0, -1.5, 0.25]), 1),
    "a quantile of a single target": (
        ML, "TreeEnsembleRegressor", lambda i: [i.f(6, 3)],
        trees("target", target_ids=[0, 0, 0, 0], n_targets=1, post_transform="PROBIT",
              target_weights=[0.1, 0.3, 0.2, 0.55]), 1),
    "the least of two targets": (
        ML, "TreeEnsembleRegressor", lambda i: [i.f(6, 3)],
        trees("target", target_ids=[0, 1, 1, 1], n_targets=2, aggregate_function="MIN",
              target_weights=[1.0, 2.0, 1.5, 0.25]), 1),
    "linear classifier by one score": (
        ML, "LinearClassifier", lambda i: [i.f(4, 3)],
        {"coefficients": [0.1, -0.2, 0.3], "intercepts": [0.5], "classlabels_ints": [7, 8],
         "post_transform": "SOFTMAX"}, 2),
    "linear regressor of one target": (
        ML, "LinearRegressor", lambda i: [i.f(4, 3)],
        {"coefficients": [0.1, -0.2, 0.3], "post_transform": "SOFTMAX"}, 1),
    "support vectors by a logistic function": (
        ML, "SVMRegressor", lambda i: [i.f(4, 3)],
        {"kernel_type": "LINEAR", "coefficients": [1.5, -0.7, 0.1], "rho": [0.2],
         "kernel_params": [0.0, 0.0, 0.0], "post_transform": "LOGISTIC"}, 1),
    "features that are filled up": (
        ML, "FeatureVectorizer", lambda i: [i.f(2, 3), i.f(2, 2)], {"inputdimensions": [4, 2]}, 1),
    "support vectors": (ML, "SVMRegressor", lambda i: [i.f(4, 3)],
                        {"kernel_type": "RBF", "kernel_params": [0.3, 0.0, 3.0], "n_supports": 2,
                         "support_vectors": [0.1, 0.2, 0.3, -0.4, 0.5, 0.6],
                         "coefficients": [1.5, -0.7], "rho": [0.2]}, 1),
    "imputer": (ML, "Imputer", lambda i: [np.array([[1, np.nan, 3]], np.float32)],
                {"imputed_value_floats": [0.5, 0.6, 0.7],
                 "replaced_value_float": float("nan")}, 1),
    "one-hot": (ML, "OneHotEncoder", lambda i: [np.array([[2], [5]])], {"cats_int64s": [1, 2, 5]}, 1),
    "features": (ML, "FeatureVectorizer", lambda i: [i.f(2, 3), i.f(2, 2)],
                 {"inputdimensions": [3, 2]}, 1),
    "binarizer": (ML, "Binarizer", lambda i: [i.f(2, 3)], {"threshold": 0.2}, 1),
    "labels by onnx.reference": (ML, "LabelEncoder", lambda i: [np.array([[2, 5]])],
                                 {"keys_int64s": [2, 5], "values_floats": [0.5, 1.5],
                                  "default_float": 0.0}, 1),
}  # fmt: skip


def test_operators_compute_what_onnx_runtime_computes() -> None:
    wrong = {}
    for name in ROWS:
        try:
            check(name)
        except Exception as error:
            wrong[name] = str(error)
    assert wrong == {}


def check(name: str) -> None:
    domain, op, drawn, attributes, count = ROWS[name]
    arrays = drawn(Inputs())
    feed = {f"i{index}": array for index, array in enumerate(arrays) if array is not None}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in feed.items()
    ]
    outputs = [f"o{index}" for index in range(count)]
    used = ["" if array is None else f"i{index}" for index, array in enumerate(arrays)]
    node = helper.make_node(op, used, outputs, "node", domain=domain, **attributes)
    graph = helper.make_graph([node], "g", infos, [onnx.ValueInfoProto(name=o) for o in outputs])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 3 if domain == ML else 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=8)
    expected = open_plain(proto.SerializeToString()).run(None, feed)
    with torch.no_grad():
        created = OnnxReference(proto).compute([from_numpy(array) for array in feed.values()])
    for item, second in zip(created, expected, strict=True):
        array = to_numpy(item)
        assert array.shape == second.shape
        if second.dtype.kind == "f":
            size = float(np.abs(second).max())
            np.testing.assert_allclose(array, second, rtol=0, atol=4e-6 * size)
        else:
            assert array.tolist() == second.tolist()
