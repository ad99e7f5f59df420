"""Sums of 100 000 terms pass with a different summation order; a fault fails."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.modules import Function, Layers
from tests.probes import benches

N = 102_400
ROWS, COLUMNS = 16, 3


def make_images(pool) -> nn.Module:
    """Return a convolution of images that are mostly background, followed by pooling."""
    return Layers(
        lambda m, x: pool(torch.relu(m.conv(x))), conv=lambda: nn.Conv2d(1, 4, 3, padding=1)
    )


def make_rows(kind, count=ROWS):
    """Return an array (count, N) whose rows are constant, nearly constant or random."""
    random = np.random.default_rng(0)
    if kind == "random":
        return random.random((count, N)).astype(np.float32)
    constant = np.repeat(random.random((count, 1)) + 0.1, N, 1)
    if kind == "nearly":
        constant += 1e-6 * random.standard_normal(constant.shape)
    return constant.astype(np.float32)


def background():
    images = np.full((4, 1, 320, 320), 0.71, np.float32)
    images[:, :, 40:90, 60:140] = np.random.default_rng(0).random((4, 1, 50, 80))
    return images


def measure_noise(model, wrong, x, tmp_path, *, opset=17):
    """Return the noise of a file that is exported from `wrong`."""
    file = benches.export(wrong.eval(), tmp_path / "model.onnx", {"x": x}, opset=opset)
    options = {"probes": False, "stability_samples": 0, "noise_samples": len(x)}
    measured = benches.measured(model.eval(), file, {"x": x}, **options)
    return measured.runtimes[0].outputs[0].noise


def reduce_last_axis(name):
    return lambda x: getattr(x, name)(-1, keepdim=True)


CORRECT = {
    "mean": reduce_last_axis("mean"),
    "var": reduce_last_axis("var"),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "product": lambda x: (1.0 + 1e-6 * x).prod(-1, keepdim=True),
    "cubic norm": lambda x: x.norm(p=3, dim=-1, keepdim=True),
    "distance": lambda x: torch.cdist(x[:, None], torch.zeros_like(x)[:, None]).flatten(1),
    "global pool": lambda x: functional.adaptive_avg_pool2d(x.view(-1, 1, 320, 320), 1).flatten(1),
    "layer norm": lambda x: functional.layer_norm(x, (N,))[:, ::1000],
    "weighted sums": lambda x: x @ torch.full((N, 32), 1.0 / N),
    "linear": lambda x: functional.linear(x, torch.full((5, N), 0.3)),
    "sum with an offset": lambda x: torch.addmm(torch.ones(2), x, torch.full((N, 2), 0.3)),
    "convolution": lambda x: functional.conv2d(
        x.view(-1, 1, 320, 320), torch.full((2, 1, 320, 320), 0.3)
    ).flatten(1),
    "transposed convolution": lambda x: functional.conv_transpose2d(
        x.view(-1, N, 1, 1), torch.full((N, 2, 1, 1), 0.3)
    ).flatten(1),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", CORRECT)
def test_equally_rounded_terms_pass(name, tmp_path):
    model = Function(CORRECT[name])
    kind = "nearly" if len(name) % 2 else "constant"
    noise = measure_noise(model, model, make_rows(kind, 6), tmp_path, opset=13)
    assert noise.ratio <= 1.5
    assert noise.peak <= 6.0


CANCELLING = {
    "linear": lambda x: functional.linear(x, torch.full((5, N), 0.3)),
    "moments": lambda x: torch.cat(torch.var_mean(x, -1, keepdim=True), -1),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_cancelling_terms_pass(name, tmp_path):
    """Pass sums that cancel: PyTorch's sum may be exactly 0 where ONNX Runtime's is not."""
    model = Function(CANCELLING[name])
    x = make_rows("constant", 6)
    x[:, ::2] *= -1.0
    noise = measure_noise(model, model, x, tmp_path, opset=13)
    assert noise.ratio <= 1.5
    assert noise.peak <= 6.0


POOLS = {
    "global pool": lambda x: functional.adaptive_avg_pool2d(x, 1).flatten(1),
    "mean": lambda x: x.mean((2, 3)),
    "group norm": lambda x: functional.group_norm(x, 2)[:, :, ::16, ::16],
}


@pytest.mark.further
@pytest.mark.parametrize("name", POOLS)
def test_mean_over_images_with_background_passes(name, tmp_path):
    model = make_images(POOLS[name])
    noise = measure_noise(model, model, background(), tmp_path)
    assert noise.ratio <= 1.5
    assert noise.peak <= 6.0


def reorder(x):
    """Return each row in three orders, as channels."""
    return torch.stack([x, x.flip(-1), x.roll(777, -1)], 1)


FAULTS = {
    "n - 1 in a mean": (
        "random",
        lambda x: reorder(x).mean(-1),
        lambda x: reorder(x).sum(-1) / (N - 1),
    ),
    "epsilon": (
        "random",
        lambda x: functional.layer_norm(x, (N,), eps=1e-5)[:, ::100],
        lambda x: functional.layer_norm(x, (N,), eps=2e-5)[:, ::100],
    ),
    "a scale of softmax": (
        "random",
        lambda x: functional.softmax(x, -1)[:, ::100],
        lambda x: functional.softmax(x * (1.0 + 1e-4), -1)[:, ::100],
    ),
}


@pytest.mark.further
@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_a_long_sum_fails(name, tmp_path):
    kind, correct, wrong = FAULTS[name]
    x = make_rows(kind)

    assert measure_noise(Function(correct), Function(wrong), x, tmp_path).ratio > 1.5


def make_repeated(correction) -> nn.Module:
    """Return the variance of repeated numbers, so that equal rounding errors add up."""
    return Function(lambda x: x.repeat(1, 1000).var(-1, correction=correction, keepdim=True))


@pytest.mark.further
@pytest.mark.parametrize(("correction", "is_right"), [(1, True), (0, False)])
def test_variance_with_n_is_found_by_the_alternating_probe(correction, is_right, tmp_path):
    """Find a wrong divisor with the alternating probe.

    On the samples, ONNX Runtime's error exceeds the difference between n and n - 1.
    """
    x = np.random.default_rng(0).random((16, 48)).astype(np.float32)
    file = benches.export(make_repeated(correction), tmp_path / "model.onnx", {"x": x})
    measured = benches.measured(make_repeated(1), file, {"x": x}, stability_samples=0)
    (runtime,) = measured.runtimes
    assert runtime.outputs[0].noise.ratio <= 1.5
    (probe,) = [probe for probe in runtime.probes if probe.name == "alternating"]
    assert (probe.noise_ratio <= 4.0) is is_right
    assert (probe.noise_ratio > 64.0) is not is_right


def test_short_sums_have_no_alternating_probe(tmp_path):
    x = np.random.default_rng(0).random((16, 48)).astype(np.float32)
    model = Function(reduce_last_axis("var"))
    file = benches.export(model, tmp_path / "model.onnx", {"x": x})
    (runtime,) = benches.measured(model, file, {"x": x}, stability_samples=0).runtimes
    assert "alternating" not in {probe.name for probe in runtime.probes}


class Group(nn.Module):
    def __init__(self, eps=1e-5, correction=0):
        super().__init__()
        self.eps, self.correction = eps, correction

    def forward(self, x):
        if not self.correction:
            return functional.group_norm(x, 2, eps=self.eps)
        rows = x.reshape(x.shape[0], 2, -1)
        spread = (rows.var(-1, keepdim=True, correction=1) + self.eps).sqrt()
        return ((rows - rows.mean(-1, keepdim=True)) / spread).reshape(x.shape)


@pytest.mark.parametrize(("wrong", "mean", "is_right"), [
    (Group(), 100.0, True),
    (Group(eps=2e-5), 10.0, False),
    (Group(correction=1), 100.0, False),
], ids=["right", "eps", "n - 1"])  # fmt: skip
def test_group_norm_is_compared_with_the_operators_of_the_file(wrong, mean, is_right, tmp_path):
    """Use the error model of the exported operators: the file has no GroupNormalization, which
    computes the variance from the mean square.
    """
    x = np.random.default_rng(0).normal(mean, 1.0, (32, 8, 100)).astype(np.float32)
    ratio = measure_noise(Group(), wrong, x, tmp_path).ratio
    assert (ratio <= 1.5) is is_right


def make_attention(keys, *, scale=1.0, missing_keys=0, queries=3, **settings):
    """Return an attention over queries, keys and values, concatenated in this order."""

    def compute(x):
        q, k, v = x.split([queries, keys, keys], 2)
        end = keys - missing_keys
        return functional.scaled_dot_product_attention(
            scale * q, k[:, :, :end], v[:, :, :end], **settings
        )

    return Function(compute)


def make_tokens(keys, *, equal):
    random = np.random.default_rng(0)
    count = 1 if equal else keys
    queries_and_keys = random.normal(size=(4, 2, 3, 8)), random.normal(size=(4, 2, count, 8))
    values = random.random((4, 2, count, 8)) + 0.1 if equal else random.normal(size=(4, 2, keys, 8))
    return np.concatenate(
        [
            queries_and_keys[0],
            *(np.repeat(part, keys // count, 2) for part in (queries_and_keys[1], values)),
        ],
        2,
    ).astype(np.float32)


@pytest.mark.parametrize(
    ("keys", "settings"), [(4096, {}), (1024, {"is_causal": True}), (1024, {"scale": 0.2})]
)
def test_attention_over_equal_keys_passes(keys, settings, tmp_path):
    """Pass attention over equal keys; softmax and weighted sums have the errors of ONNX Runtime's
    operators.
    """
    model = make_attention(keys, **settings)
    noise = measure_noise(model, model, make_tokens(keys, equal=True), tmp_path)
    assert noise.ratio <= 1.5
    assert noise.peak <= 6.0


def test_fault_in_attention_over_many_keys_fails(tmp_path):
    x = make_tokens(4096, equal=False)
    noise = measure_noise(make_attention(4096), make_attention(4096, missing_keys=1), x, tmp_path)
    assert noise.ratio > 10.0
