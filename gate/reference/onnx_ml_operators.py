"""Operators of ai.onnx.ml that compute numbers: scalers, linear models and trees.

Operators that only move or rename values (label encoders, maps) do not round; `onnx.reference`
computes them (`gate.reference.onnx_reference`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from gate.reference.onnx_operators import (
    OperatorCall,
    Tensor,
    Value,
    is_text,
    operator,
    tensor_from_proto,
)

ML = "ai.onnx.ml"
_ml = partial(operator, domain=ML)


def _floats(x: Tensor) -> Tensor:
    """Return integers as the default float dtype; floats are unchanged.

    ONNX Runtime computes float64 inputs in float32 here.
    """
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


@_ml("Scaler")
def _scaler(call: OperatorCall, x: Tensor) -> Tensor:
    x = _floats(x)
    return (x - x.new_tensor(call.get("offset"))) * x.new_tensor(call.get("scale"))


@_ml("Normalizer")
def _normalizer(call: OperatorCall, x: Tensor) -> Tensor:
    x = _floats(x)
    kind = call.get("norm", "MAX")
    if kind == "MAX":
        norm = x.amax(-1, keepdim=True)
    elif kind == "L1":
        norm = x.abs().sum(-1, keepdim=True)
    else:
        norm = (x * x).sum(-1, keepdim=True).sqrt()
    return torch.where(norm == 0, x, x / norm)


@_ml("Binarizer")
def _binarizer(call: OperatorCall, x: Tensor) -> Tensor:
    return (x > call.get("threshold", 0.0)).to(x.dtype)


@_ml("ArrayFeatureExtractor")
def _array_feature_extractor(_call: OperatorCall, x: Value, index: Tensor) -> Value:
    indices = index.reshape(-1).to(torch.int64)
    selected = np.take(x, indices.numpy(), -1) if is_text(x) else torch.index_select(x, -1, indices)
    return selected.reshape(1, -1) if selected.ndim == 1 else selected


@_ml("Imputer")
def _imputer(call: OperatorCall, x: Tensor) -> Tensor:
    floats = x.is_floating_point()
    kind = "floats" if floats else "int64s"
    values = call.get(f"imputed_value_{kind}")
    gap = call.get("replaced_value_float" if floats else "replaced_value_int64", 0)
    missing = torch.isnan(x) if floats and np.isnan(gap) else x == gap
    return torch.where(missing, x.new_tensor(values), x)


@_ml("FeatureVectorizer")
def _feature_vectorizer(call: OperatorCall, *values: Tensor) -> Tensor:
    sizes = call.get("inputdimensions") or [value.shape[-1] for value in values]
    parts = []
    for value, size in zip(values, sizes, strict=True):
        part = _floats(value.reshape(len(value), -1))[:, :size]
        parts.append(functional.pad(part, (0, size - part.shape[1])))
    return torch.cat(parts, 1)


@_ml("OneHotEncoder")
def _onehot_encoder(call: OperatorCall, x: Value) -> Tensor:
    if is_text(x):
        names = np.array(call.get("cats_strings"), object)
        hot = torch.from_numpy(np.asarray(x[..., None] == names, bool))
    else:
        hot = x.to(torch.int64).unsqueeze(-1) == torch.tensor(call.get("cats_int64s"))
    return hot.to(torch.get_default_dtype())


@_ml("ZipMap")
def _zip_map(call: OperatorCall, x: Tensor) -> Value:
    """Return the values and keys of the maps, each of shape (samples, keys), as a session does."""
    texts, x = call.get("classlabels_strings"), x.reshape(-1, x.shape[-1])
    keys = np.array(texts, object) if texts else np.array(call.get("classlabels_int64s"), np.int64)
    order = np.argsort(keys, kind="stable")
    rows = np.broadcast_to(keys[order], tuple(x.shape))
    return x[:, torch.from_numpy(order)], rows if texts else torch.from_numpy(rows.copy())


# Scores and labels.


def _probit(p: Tensor) -> Tensor:
    """Return quantiles of the normal distribution with ONNX Runtime's approximation (error
    2e-3)."""
    x = 2 * p - 1
    log = torch.log((1 - x) * (1 + x))
    half = 2 / (3.14159 * 0.147) + log / 2
    return 1.41421356 * torch.sign(x) * torch.sqrt(torch.sqrt(half * half - log / 0.147) - half)


def _transform(scores: Tensor, transform: str) -> Tensor:
    if transform == "LOGISTIC":
        return torch.sigmoid(scores)
    if transform == "SOFTMAX":
        return torch.softmax(scores, 1)
    if transform == "SOFTMAX_ZERO":  # zeros stay zero
        filled = torch.where(scores == 0, scores.new_tensor(-torch.inf), scores)
        return torch.nan_to_num(torch.softmax(filled, 1))
    return _probit(scores) if transform == "PROBIT" else scores


def _regressor_scores(scores: Tensor, transform: str) -> Tensor:
    """Return the scores of a regressor. For one target, ONNX Runtime applies only PROBIT."""
    return (
        scores if scores.shape[1] == 1 and transform != "PROBIT" else _transform(scores, transform)
    )


def _paired_scores(score: Tensor, transform: str, *, shares: bool) -> Tensor:
    """Return scores of two classes from that of the second. `shares`: whether they add up to 1."""
    pair = torch.stack([1 - score if shares and transform != "LOGISTIC" else -score, score], 1)
    return torch.sigmoid(pair) if transform == "LOGISTIC" else pair


def _select_labels(call: OperatorCall, indices: Tensor) -> Value:
    texts = call.get("classlabels_strings")
    if texts:
        return np.array(texts, object)[indices.numpy()]
    numbers = call.get("classlabels_int64s") or call.get("classlabels_ints")
    return torch.tensor(numbers, dtype=torch.int64)[indices] if numbers else indices


@_ml("LinearRegressor")
def _linear_regressor(call: OperatorCall, x: Tensor) -> Tensor:
    x, targets = _floats(x), call.get("targets", 1)
    weight = x.new_tensor(call.get("coefficients")).reshape(targets, -1)
    scores = x @ weight.T
    if call.get("intercepts"):
        scores = scores + x.new_tensor(call.get("intercepts"))
    return _regressor_scores(scores, call.get("post_transform", "NONE"))


@_ml("LinearClassifier")
def _linear_classifier(call: OperatorCall, x: Tensor) -> Value:
    x = _floats(x)
    x = x.reshape(1, -1) if x.ndim == 1 else x
    rows = len(call.get("coefficients")) // x.shape[1]
    scores = x @ x.new_tensor(call.get("coefficients")).reshape(rows, -1).T
    if call.get("intercepts"):
        scores = scores + x.new_tensor(call.get("intercepts"))
    transform = call.get("post_transform", "NONE")
    if rows == 1:
        indices = (scores[:, 0] > 0).to(torch.int64)
        return _select_labels(call, indices), _paired_scores(scores[:, 0], transform, shares=True)
    return _select_labels(call, scores.argmax(1)), _transform(scores, transform)


# Trees. All samples descend all trees together, one level per step.

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ",
          "BRANCH_MEMBER")  # fmt: skip


class _Forest:
    """The trees' nodes as arrays; the children of a leaf are the leaf itself."""

    def __init__(self, call: OperatorCall) -> None:
        get = call.get
        trees, numbers = get("nodes_treeids"), get("nodes_nodeids")
        index_of = {pair: i for i, pair in enumerate(zip(trees, numbers, strict=True))}
        count = len(trees)
        self.feature = torch.tensor(get("nodes_featureids"))
        stored = get("nodes_values_as_tensor")
        self.edge = (
            torch.tensor(list(get("nodes_values")), dtype=torch.float64)
            if stored is None
            else tensor_from_proto(stored).double()
        )
        modes = list(get("nodes_modes"))
        leaves = [mode == "LEAF" for mode in modes]
        self.mode = torch.tensor([0 if mode == "LEAF" else _MODES.index(mode) for mode in modes])
        below = [
            [i if leaves[i] else index_of[trees[i], child] for i, child in enumerate(get(name))]
            for name in ("nodes_truenodeids", "nodes_falsenodeids")
        ]
        self.true, self.false = (torch.tensor(children) for children in below)
        lost = get("nodes_missing_value_tracks_true") or [0] * count
        self.lost = torch.tensor(lost, dtype=torch.bool)
        children = {child for branch in below for i, child in enumerate(branch) if not leaves[i]}
        self.roots = torch.tensor([i for i in range(count) if i not in children])
        self.leaf = torch.tensor(leaves)
        self.index_of = index_of

    def leaves(self, x: Tensor) -> Tensor:
        """Return the leaf of each sample in each tree, shape (samples, trees)."""
        at = self.roots.expand(len(x), -1)
        # ONNX Runtime compares in the dtype of the input, and thresholds are float32 numbers.
        edges = self.edge.to(x.dtype)
        while not bool(self.leaf[at].all()):
            value, edge, mode = torch.gather(x, 1, self.feature[at]), edges[at], self.mode[at]
            outcomes = torch.stack([value <= edge, value < edge, value >= edge, value > edge,
                                 value == edge, value != edge])  # fmt: skip
            goes_true = torch.gather(outcomes, 0, mode.unsqueeze(0)).squeeze(0)
            goes_true = goes_true | (torch.isnan(value) & self.lost[at])
            at = torch.where(goes_true, self.true[at], self.false[at])
        return at


def _forest(call: OperatorCall) -> _Forest:
    if "forest" not in call.derived:
        call.derived["forest"] = _Forest(call)
    forest: _Forest = call.derived["forest"]
    return forest


def _weights(call: OperatorCall, kind: str) -> Tensor:
    stored = call.get(f"{kind}_weights_as_tensor")
    if stored is None:
        return torch.tensor(list(call.get(f"{kind}_weights")), dtype=torch.float64)
    weights: Tensor = tensor_from_proto(stored).double()
    return weights


def _votes(call: OperatorCall, x: Tensor, kind: str, count: int) -> tuple[Tensor, Tensor]:
    """Return the weights aggregated over the trees, and which targets have any.

    Both have shape (samples, targets). `kind`: `class` or `target`.
    """
    forest, get = _forest(call), call.get
    owners = [
        forest.index_of[pair]
        for pair in zip(get(f"{kind}_treeids"), get(f"{kind}_nodeids"), strict=True)
    ]
    where = torch.tensor(owners), torch.tensor(get(f"{kind}_ids"))
    table = torch.zeros(len(forest.leaf), count, dtype=torch.float64)
    table.index_put_(where, _weights(call, kind), True)
    voted = torch.zeros(len(forest.leaf), count, dtype=torch.bool)
    voted[where] = True
    at = forest.leaves(x)
    return _aggregate(call, table.to(x.dtype)[at], voted[at]), voted[at].any(1)


def _aggregate(call: OperatorCall, votes: Tensor, voted: Tensor) -> Tensor:
    """Aggregate the weights of all trees.

    For the minimum and maximum, trees without a weight for a target are skipped.
    """
    transform = call.get("aggregate_function", "SUM")
    if transform not in ("MIN", "MAX"):
        return votes.mean(1) if transform == "AVERAGE" else votes.sum(1)
    worst = votes.new_tensor(torch.inf if transform == "MIN" else -torch.inf)
    candidates = torch.where(voted, votes, worst)
    best = candidates.amin(1) if transform == "MIN" else candidates.amax(1)
    return torch.where(voted.any(1), best, torch.zeros_like(best))


def _base(call: OperatorCall, x: Tensor) -> Tensor | None:
    stored = call.attributes.get("base_values_as_tensor")
    if stored is not None:
        base: Tensor = tensor_from_proto(stored).to(x.dtype)
        return base
    values = call.get("base_values")
    return x.new_tensor(list(values)) if values else None


@_ml("TreeEnsembleRegressor")
def _tree_regressor(call: OperatorCall, x: Tensor) -> Tensor:
    x = _floats(x)
    scores, _ = _votes(call, x, "target", call.get("n_targets"))
    base = _base(call, x)
    return _regressor_scores(scores if base is None else scores + base, call.get("post_transform"))


@_ml("TreeEnsembleClassifier")
def _tree_classifier(call: OperatorCall, x: Tensor) -> Value:
    x = _floats(x)
    count = len(call.get("classlabels_strings") or call.get("classlabels_int64s"))
    scores, voted = _votes(call, x, "class", count)
    base, transform = _base(call, x), call.get("post_transform", "NONE")
    if count <= 2:
        return _binary(call, scores, voted, base)
    scores = scores if base is None else scores + base
    ranked = torch.where(voted, scores, scores.new_tensor(-torch.inf)) if base is None else scores
    return _select_labels(call, ranked.argmax(1)), _transform(scores, transform)


def _binary(call: OperatorCall, scores: Tensor, voted: Tensor, base: Tensor | None) -> Value:
    """Return labels and scores of one or two classes by ONNX Runtime's rules; ONNX defines none.

    If all leaves have one class, its score decides: positive weights are probabilities, others are
    compared with 0. If a sample has no leaf of the second class, both scores derive from the first,
    unless there are two base values.
    """
    transform, zero = call.get("post_transform", "NONE"), torch.zeros_like(scores[:, 0])
    single = scores.shape[1] == 2 and len(set(call.get("class_ids"))) == 1
    shares = single and bool((_weights(call, "class") >= 0).all())
    first, has_first = scores[:, 0], voted[:, 0]
    second, has_second = (scores[:, 1], voted[:, 1]) if scores.shape[1] == 2 else (zero, zero > 0)
    if base is not None and len(base) == 2:
        alone = zero > 0
        total = base[1] + first
        first = torch.where(has_second, -total, first + base[0])
        second, has_first = torch.where(has_second, total, zero), has_first | ~has_second
    else:
        alone = ~has_second
        first = first if base is None else first + base[0]
    decisive = torch.where(has_second, second, first)
    indices = (decisive > (0.5 if shares else 0.0)).to(torch.int64)
    labels = _select_labels(call, indices) if single or call.get("classlabels_strings") else indices
    if scores.shape[1] == 1:
        return labels, first.unsqueeze(1)
    pair = torch.stack(
        [torch.where(has_first, first, zero), torch.where(has_second, second, zero)], 1
    )
    derived = _paired_scores(first, transform, shares=shares)
    return labels, torch.where(alone.unsqueeze(1), derived, _transform(pair, transform))


@_ml("SVMRegressor")
def _svm_regressor(call: OperatorCall, x: Tensor) -> Tensor:
    x = _floats(x)
    coefficients = x.new_tensor(call.get("coefficients"))
    count = call.get("n_supports", 0)
    if count:
        vectors = x.new_tensor(call.get("support_vectors")).reshape(count, -1)
        scores = _kernel(call, x, vectors) @ coefficients
    else:
        scores = _kernel(call, x, coefficients.reshape(1, -1)).squeeze(1)
    scores = (scores + x.new_tensor(call.get("rho"))[0]).unsqueeze(1)
    if call.get("one_class", 0):
        return torch.where(scores > 0, torch.ones_like(scores), -torch.ones_like(scores))
    return scores  # ONNX Runtime ignores post_transform


def _kernel(call: OperatorCall, x: Tensor, vectors: Tensor) -> Tensor:
    gamma, shift, degree = call.get("kernel_params") or (0.0, 0.0, 0.0)
    kind: Any = call.get("kernel_type", "LINEAR")
    if kind == "RBF":
        distance = ((x.unsqueeze(1) - vectors) ** 2).sum(-1)
        return torch.exp(-gamma * distance)
    product = x @ vectors.T
    if kind == "POLY":
        return (gamma * product + shift) ** degree
    return torch.tanh(gamma * product + shift) if kind == "SIGMOID" else product
