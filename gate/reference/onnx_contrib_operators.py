"""Operators of com.microsoft: fused operators, and distances in files from scikit-learn."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from gate.reference.onnx_network_operators import convolve, heads, layer_norm, rotate
from gate.reference.onnx_operators import OperatorCall, Tensor, Value, operator
from gate.reference.onnx_quantized_operators import MICROSOFT


@operator("Gelu", "BiasGelu", "FastGelu", domain=MICROSOFT)
def _gelu(call: OperatorCall, x: Tensor, bias: Tensor | None = None) -> Tensor:
    approximate = "tanh" if call.operator == "FastGelu" else "none"
    return functional.gelu(x if bias is None else x + bias, approximate=approximate)


@operator("QuickGelu", domain=MICROSOFT)
def _quick_gelu(call: OperatorCall, x: Tensor) -> Tensor:
    return x * torch.sigmoid(call.get("alpha", 1.702) * x)


@operator("CDist", domain=MICROSOFT)
def _distances(call: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    # Like ONNX Runtime: close points lose digits, which counts as rounding.
    squares = (a * a).sum(1, keepdim=True) - 2 * (a @ b.T) + (b * b).sum(1)
    squares = squares.clamp(min=0.0)
    return squares if call.get("metric", "sqeuclidean") == "sqeuclidean" else squares.sqrt()


def _activate(call: OperatorCall, x: Tensor) -> Tensor:
    """Apply the activation that was fused into a convolution or product."""
    name = call.get("activation", "")
    values = call.get("activation_params") or []
    first = values[0] if values else call.get("activation_alpha")
    second = values[1] if len(values) > 1 else call.get("activation_beta")
    if not name:
        return x
    if name == "Relu":
        return torch.relu(x)
    if name == "Sigmoid":
        return torch.sigmoid(x)
    if name == "Tanh":
        return torch.tanh(x)
    if name == "LeakyRelu":
        return functional.leaky_relu(x, 0.01 if first is None else first)
    if name == "Clip":
        return torch.clamp(x, first, second)
    if name == "HardSigmoid":
        slope, shift = 0.2 if first is None else first, 0.5 if second is None else second
        return (slope * x + shift).clamp(0.0, 1.0)
    raise NotImplementedError(f"{call.operator} with activation {name}")


@operator("FusedConv", domain=MICROSOFT)
def _fused_conv(
    call: OperatorCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    result = convolve(call, x, weight, bias)
    return _activate(call, result if added is None else result + added)


@operator("FusedGemm", domain=MICROSOFT)
def _fused_gemm(call: OperatorCall, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if call.get("transA", 0) else a
    product = a @ (b.T if call.get("transB", 0) else b) * call.get("alpha", 1.0)
    return _activate(call, product if c is None else product + call.get("beta", 1.0) * c)


@operator("FusedMatMul", domain=MICROSOFT)
def _fused_matmul(call: OperatorCall, a: Tensor, b: Tensor) -> Tensor:
    def transposed(x: Tensor, suffix: str) -> Tensor:
        if call.get(f"transBatch{suffix}", 0):  # (d0, d1, ..., d) to (d1, ..., d0, d)
            x = x.movedim(0, -2)
        return x.transpose(-1, -2) if call.get(f"trans{suffix}", 0) and x.ndim > 1 else x

    product = torch.matmul(transposed(a, "A"), transposed(b, "B"))
    alpha = call.get("alpha", 1.0)
    return product if alpha == 1 else alpha * product


@operator("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_layer_norm(call: OperatorCall, x: Tensor, skip: Tensor, gamma: Tensor,
                     *rest: Tensor | None) -> Value:  # fmt: skip
    simple = call.operator.startswith("SkipSimplified")
    beta, bias = (*rest, None, None)[:2] if not simple else (None, *rest, None)[:2]
    total = x + skip if bias is None else x + bias + skip
    if simple:
        square = (total * total).mean(-1, keepdim=True)
        result = total * torch.rsqrt(square + call.get("epsilon", 1e-5)) * gamma
    else:
        norm = replace(call, outputs=1, attributes={"epsilon": call.get("epsilon", 1e-12)})
        result = layer_norm(norm, total, gamma, beta)
    return (result, None, None, total)[: call.outputs]


@operator("EmbedLayerNormalization", domain=MICROSOFT)
def _embed_layer_norm(
    call: OperatorCall,
    words: Tensor,
    segments: Tensor | None,
    word: Tensor,
    position: Tensor,
    segment: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Value:
    if position_ids is None:
        position_ids = torch.arange(words.shape[1]).unsqueeze(0)
    total = word[words.to(torch.int64)] + position[position_ids.to(torch.int64)]
    if segments is not None and segment is not None:
        total = total + segment[segments.to(torch.int64)]
    norm = replace(call, outputs=1, attributes={"epsilon": call.get("epsilon", 1e-12)})
    index = words.new_zeros(len(words), dtype=torch.int32)
    if mask is not None:
        index = mask.sum(1).to(torch.int32)
    return (layer_norm(norm, total, gamma, beta), index, total)[: call.outputs]


def _attend(call: OperatorCall, qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None) -> Tensor:
    """Return the result of attention, (batch, length, heads * size), from queries, keys and values
    by heads."""
    q, k, v = qkv
    scale = call.get("scale", 0.0) or 1.0 / math.sqrt(q.shape[-1])
    scores = (q @ k.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    if call.get("unidirectional", 0):
        length, total = scores.shape[-2:]
        later = torch.ones(length, total, dtype=torch.bool).triu(total - length + 1)
        scores = scores.masked_fill(later, torch.finfo(torch.float32).min)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


def _mask_bias(call: OperatorCall, mask: Tensor, batch: int, total: int, like: Tensor) -> Tensor:
    """Return the bias that ONNX Runtime adds to the scores of padding keys."""
    if mask.ndim == 1:
        ends = mask[:batch].reshape(-1, 1)
        kept = torch.arange(total) < ends
        if len(mask) == 2 * batch:
            kept = kept & (torch.arange(total) >= mask[batch:].reshape(-1, 1))
    else:
        kept = mask != 0
    fill = like.new_tensor(call.get("mask_filter_value", -10000.0))
    shape = (batch, 1, 1, total) if kept.ndim == 2 else (batch, 1, *kept.shape[-2:])
    return torch.where(kept, like.new_zeros(()), fill).reshape(shape)


@operator("Attention", domain=MICROSOFT)
def _attention(
    call: OperatorCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    added: Tensor | None = None,
    _length: Any = None,
) -> Value:
    count = call.get("num_heads")
    projected = x @ weight
    projected = projected if bias is None else projected + bias
    sizes = call.get("qkv_hidden_sizes") or [projected.shape[-1] // 3] * 3
    q, k, v = (heads(part, count) for part in torch.split(projected, list(sizes), -1))
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    extra = None if mask is None else _mask_bias(call, mask, len(x), k.shape[2], x)
    if added is not None:
        extra = added if extra is None else extra + added
    output = _attend(call, (q, k, v), extra)
    return output if call.outputs < 2 else (output, torch.stack([k, v]))


@operator("MultiHeadAttention", domain=MICROSOFT)
def _multi_head_attention(
    call: OperatorCall,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    added: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    *_rest: Any,
) -> Value:
    count = call.get("num_heads")
    if query.ndim == 5:  # (batch, length, heads, 3, size)
        q, k, v = (part.transpose(1, 2) for part in query.unbind(3))
    else:
        if key is not None and key.ndim == 5:
            key, value = (part.flatten(2) for part in key.unbind(3))
        assert key is not None
        assert value is not None
        parts = [query, key, value]
        if bias is not None:
            width = query.shape[-1]
            shifts = torch.split(bias, [width, width, len(bias) - 2 * width])
            parts = [
                part + shift if part.ndim == 3 else part + shift.reshape(1, count, 1, -1)
                for part, shift in zip(parts, shifts, strict=True)
            ]
        q, k, v = (heads(part, count) if part.ndim == 3 else part for part in parts)
    if past_k is not None and past_v is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    extra = None if mask is None else _mask_bias(call, mask, len(q), k.shape[2], q)
    if added is not None:
        extra = added if extra is None else extra + added
    output = _attend(call, (q, k, v), extra)
    return (output, k, v)[: call.outputs]


@operator("RotaryEmbedding", domain=MICROSOFT)
def _rotary(call: OperatorCall, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = call.get("rotary_embedding_dim", 0)
    flat = x.ndim == 3
    if flat:
        count = call.get("num_heads", 0) or x.shape[-1] // (cos.shape[-1] * 2)
        x = heads(x, count)
    if positions.numel() == 1 and positions.ndim == 1:
        positions = positions + torch.arange(x.shape[2]).unsqueeze(0)
    positions = positions.expand(len(x), x.shape[2])
    interleaved = bool(call.get("interleaved", 0))
    result = rotate(x, cos, sin, positions, width=width, interleaved=interleaved)
    return result.transpose(1, 2).flatten(2) if flat else result


@operator("GroupQueryAttention", domain=MICROSOFT)
def _group_query_attention(
    call: OperatorCall,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_k: Tensor | None,
    past_v: Tensor | None,
    last: Tensor,
    total: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    position_ids: Tensor | None = None,
    added: Tensor | None = None,
    sink: Tensor | None = None,
    *_scales: Any,
) -> Value:
    """Compute the samples one by one. `last`: index of each sample's last key, shape (batch,)."""
    groups, count = call.get("kv_num_heads"), call.get("num_heads")
    length, most = query.shape[1], int(total.reshape(()))
    if key is None or value is None:  # packed
        size = query.shape[-1] // (count + 2 * groups)
        query, key, value = torch.split(query, [count * size, groups * size, groups * size], -1)
    q, k, v = heads(query, count), heads(key, groups), heads(value, groups)
    kept = max(most, 0 if past_k is None else past_k.shape[2])
    present = [x.new_zeros(len(x), groups, kept, x.shape[-1]) for x in (k, v)]
    rows = []
    for row, end in enumerate((last.reshape(-1) + 1).tolist()):
        before = 0 if length == most else end - length
        positions = before + torch.arange(length)
        qk = [q[row : row + 1], k[row : row + 1]]
        if call.get("do_rotary", 0):
            assert cos is not None
            assert sin is not None
            rotary_positions = positions if position_ids is None else position_ids[row]
            qk = [
                rotate(x, cos, sin, rotary_positions.unsqueeze(0), width=2 * cos.shape[-1],
                        interleaved=bool(call.get("rotary_interleaved", 0)))
                for x in qk
            ]  # fmt: skip
        for cache, past, new in zip(present, (past_k, past_v), (qk[1][0], v[row]), strict=True):
            if past is not None:
                cache[row, :, :before] = past[row, :, :before]
            cache[row, :, before : before + length] = new
        span = before + length
        keys, values = (x[row].repeat_interleave(count // groups, 0)[:, :span] for x in present)
        bias = None if added is None else added[row if len(added) > 1 else 0, ..., :span]
        rows.append(_attend_sample(call, (qk[0][0], keys, values), positions, bias=bias, sink=sink))
    return (torch.stack(rows).transpose(1, 2).flatten(2), *present)[: call.outputs]


def _attend_sample(
    call: OperatorCall,
    qkv: tuple[Tensor, Tensor, Tensor],
    at: Tensor,
    *,
    bias: Tensor | None,
    sink: Tensor | None,
) -> Tensor:
    """Return the attention of one sample, (heads, length, size). `at`: positions of the queries.

    Queries do not attend to later keys, and within a window only to the last ones.
    """
    q, k, v = qkv
    scores = q @ k.transpose(-1, -2) * (call.get("scale", 0.0) or 1.0 / math.sqrt(q.shape[-1]))
    cap, window = call.get("softcap", 0.0), call.get("local_window_size", -1)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    offset = at.unsqueeze(1) - torch.arange(k.shape[1])
    hidden = (offset < 0) | (offset >= window if window > 0 else offset < 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None or call.get("smooth_softmax", 0):
        sink_scores = scores.new_zeros(len(scores)) if sink is None else sink.to(scores.dtype)
        scores = torch.cat([scores, sink_scores.reshape(-1, 1, 1).expand(-1, len(at), 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] @ v
    return torch.softmax(scores, -1) @ v
