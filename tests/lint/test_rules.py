"""Source code with exactly one lint finding, and source code without findings."""

from __future__ import annotations

import pytest

from tests.lint.written import finding_titles, lint

REACHING_OUTPUT = [
    "y = self.fc(x)\nloss = y.sum()\nif not torch.jit.is_tracing():\n    loss = y.mean()\n"
    "return y, loss",
    "z = x\nif not torch.jit.is_tracing():\n    z = x * 2\ny = z + 1\nreturn self.fc(y)",
    "out = [x]\nif not torch.jit.is_tracing():\n    out.append(x * 2)\nreturn out[-1]",
    "y = x * 1\nif torch.jit.is_tracing():\n    y[0] = 0\nreturn y",
    "if not torch.jit.is_tracing():\n    self.kept = x * 2\nreturn x + self.kept",
    "if not torch.jit.is_tracing():\n    self.kept = x * 2\nreturn self.fc(x) + self.later()",
    "n = 1\nif torch.jit.is_tracing():\n    n = 2\nfor _ in range(n):\n    x = x * 2\nreturn x",
    "n = 1\nif torch.jit.is_tracing():\n    n = 2\nif n > 1:\n    x = x * 2\nreturn x",
    "out = []\nz = 2 if torch.jit.is_tracing() else 1\nout.append(x * z)\nreturn out[0]",
    "if torch.jit.is_tracing():\n    return x\nx = x * 2\nreturn x",
    "def late():\n    return scale\nscale = 1\nif torch.jit.is_tracing():\n    scale = 2\n"
    "return x * late()",
    "if not torch.jit.is_tracing():\n    self.fc.weight.mul_(2)\nreturn self.fc(x)",
    "kept = self.table\nif not torch.jit.is_tracing():\n    kept['a'] = x\nreturn self.table['a'] + x",
    "if not torch.jit.is_tracing():\n    math.scale = 2\nreturn x * math.pi",
    "y = x * 1\nz = y\nif torch.jit.is_tracing():\n    z += 1\nreturn y",
    "for layer in self.layers:\n    if torch.jit.is_tracing():\n        layer.bias = None\n"
    "    x = layer(x)\nreturn x",
]
"""Guarded values that reach the output in some way."""

WITH_FINDING = [
    ("TRC017 error", "return F.softplus(x, 1, 2.0)"),
    ("TRC017 error", "return F.avg_pool2d(x, 2, 2, 0, False, True, 3)"),
    ("TRC017 error", "return torch.cdist(x, x, 1)"),
    ("TRC017 error", "return F.pairwise_distance(x, x * 2, 1.0)"),
    ("TRC017 error", "return x.std(1, correction=0.5)"),
    ("TRC018 warning", "return x.index_put((self.i,), self.w, accumulate=True)"),
    ("TRC018 warning", "return x // 2"),
    ("TRC018 warning", "x //= 2\nreturn x"),
    ("TRC018 warning", "return torch.floor_divide(x, 2)"),
    ("TRC018 warning", "return F.logsigmoid(x)"),
    ("TRC018 warning", "return F.cosine_similarity(x, x * 2, 1, 0.1)"),
    ("TRC001 error", "return x * float(x.max())"),
    ("TRC001 error", "return x[int(x.argmax())]"),
    ("TRC001 error", "return x * math.sqrt(x.sum())"),
    ("TRC001 error", "return x + torch.tensor(x.sum())"),
    ("TRC001 error", "y = x.cpu().detach()\nreturn x + torch.from_numpy(y.numpy())"),
    ("TRC002 error", "return x / x.std().item()"),
    ("TRC002 error", "scale = [row.item() for row in x.unbind()]\nreturn x * scale[0]"),
    ("TRC003 error", "return x * torch.tensor(x[0].tolist())"),
    ("TRC004 error", "return x.reshape(int(x.shape[0]), -1)"),
    ("TRC004 error", "return x / x.shape.numel()"),
    ("TRC004 error", "return x * round(x.shape[0] / 2)"),
    ("TRC004 error", "return x / np.prod(x.shape)"),
    ("TRC005 error", "return x / len(x)"),
    ("TRC006 error", "return x.data * 2"),
    ("TRC006 error", "y = x * 1\ny.data = x + 1\nreturn y"),
    ("TRC006 warning", "return x * self.w.data"),
    ("TRC007 error", "n = x.shape[1]\nm = n\nm += 1\nreturn x * (m / n)"),
    ("TRC007 error", "s = x.shape\nn = s[0]\nn *= 2\nreturn x * (n / s[0])"),
    ("TRC008 error", "if x.sum() > 0:\n    x = x * 2\nreturn x"),
    ("TRC008 error", "while not torch.all(x < 1):\n    x = x / 2\nreturn x"),
    ("TRC008 error", "if self.w is not None and x.sum() > 0:\n    x = x * 2\nreturn x"),
    ("TRC008 error", "y = 0\nfor row in x:\n    y = y + row\nreturn y"),
    ("TRC008 error", "return x * sum(x)"),
    ("TRC008 error", "return x * max(x.sum(), x.mean())"),
    ("TRC008 error", "y = x\nfor _ in range(x.argmax()):\n    y = y * 2\nreturn y"),
    ("TRC008 error", "a = 0\na = a + x\nif a.sum() > 0:\n    return x\nreturn a"),
    ("TRC008 error", "y = x\nwhile True:\n    y = y / 2\n    if y.max() < 1:\n        break\nreturn y"),
    ("TRC008 error", "if torch.is_nonzero(x.sum()):\n    x = x * 2\nreturn x"),
    ("TRC008 error", "match x.argmax():\n    case 0:\n        x = x * 2\nreturn x"),
    ("TRC008 error", "try:\n    y = self.fc(x)\nexcept RuntimeError:\n    y = x\nif y.sum() > 0:\n    return x\nreturn y"),
    ("TRC008 error", "return {k: x for k in [1] if x.sum() > 0}[1]"),
    ("TRC008 error", "if (y := x.sum()) > 0:\n    return y\nreturn x"),
    ("TRC008 error", "(lambda t: t)(x)\nif not x.any():\n    x = x * 2\nreturn x"),
    ("TRC008 error", "import torch.nn.functional as G\ny = G.relu(x)\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "y = self.layers[0](x)\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "y = x + self.table['a']\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "def f(*ts, k=1, **more):\n    return ts[0] * k\ny = f(*[x, x], k=2)\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "y, (h, c) = self.lstm(x)\nreturn y if y.sum() > 0 else x"),
    ("TRC001 error", "return x * [1.0, 2.0][x.argmax()]"),
    ("TRC001 error", "return self.layers[x.argmax()](x)"),
    ("TRC001 error", "return x * self.list[x.argmax()]"),
    ("TRC001 error", "return x * x.argmax().__index__()"),
    ("TRC004 error", "return x * x.shape[0].__index__()"),
    ("TRC008 error", "return x * (x.sum() > 0 and 2 or 1)"),
    ("TRC008 error", "scale = x.sum() or 1\nreturn x * scale"),
    ("TRC008 error", "flag = not (x.any() and self.size)\nreturn x * flag"),
    ("TRC008 error", "return x + bool(x.sum() > 0)"),
    ("TRC008 note", "if x.isnan().any() and self.size:\n    raise ValueError('NaN')\nreturn x"),
    ("TRC008 note", "assert (self.size and (x > 0).all() and 3) or self.extra\nreturn x"),
    ("TRC008 note", "ok = (x > 0).all() and (x < 1).all()\nif not ok:\n    raise ValueError\nreturn x"),
    ("TRC008 note", "if torch.isnan(x).any():\n    raise ValueError('NaN')\nreturn x"),
    ("TRC009 error", "return x[torch.tensor([0, -1]), torch.tensor([1, 1])]"),
    ("TRC009 error", "return x[[0, -1], [1, 1]]"),
    ("TRC009 error", "return x[self.i, self.i]"),
    ("TRC009 note", "return x[:, torch.tensor([-1, 0])]"),
    ("TRC009 warning", "return x[torch.arange(4), x.argmax(1) - 1]"),
    ("TRC010 error", "y = x * 1\ny[:, None] = x[:, None]\nreturn y"),
    ("TRC010 error", "y = x * 1\ny[:, torch.tensor([[0, 1], [2, 3]])] = 1.0\nreturn y"),
    ("TRC010 warning", "y = x * 1\ny[torch.tensor([[0, 1], [2, 3]])] = 1.0\nreturn y"),
    ("TRC010 error", "y = x * 1\nreturn y.index_put_((None, torch.tensor([[0], [1]])), x[:, :1])"),
    ("TRC011 error", "y = x * 1\ny[:, :3] = x[:, 0].unsqueeze(1)\nreturn y"),
    ("TRC011 error", "y = torch.zeros(4, 6)\ny[:, :3] = x.new_ones(3) * x.sum()\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[:, 1:3] = x[:, 3:4] - x.mean((0, 1), keepdim=True)\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[:, :3] = x.mean(0)[:3]\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[:, torch.tensor([0, 1])] = x[:, 2:3]\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[x[:, 0] > 0] = x.mean()\nreturn y"),
    ("TRC012 warning", "return {'a': x}"),
    ("TRC012 warning", "out = {}\nout['a'] = x\nreturn out"),
    ("TRC012 warning", "return dict(a=x)"),
    ("TRC012 error", "return x, 'cat'"),
    ("TRC013 error", "return F.dropout(x)"),
    ("TRC013 error", "return F.dropout(x, 0.1)"),
    ("TRC013 error", "return torch.dropout(x, 0.1, True)"),
    ("TRC014 error", "if torch.jit.is_tracing():\n    return x * 2\nreturn x"),
    ("TRC014 error", "if not torch.jit.is_tracing():\n    x = x * 2\nreturn x"),
    ("TRC014 error", "return x * 2 if torch.jit.is_tracing() else x"),
    ("TRC014 error", "traced = torch.jit.is_tracing()\nif traced:\n    x = x + 1\nreturn x"),
    ("TRC014 error", "if torch.jit.is_tracing():\n    x.mul_(2)\nreturn x"),
    *(("TRC014 error", body) for body in REACHING_OUTPUT),
    ("TRC014 warning", "if torch.onnx.is_in_onnx_export():\n    return x * 2\nreturn x"),
    ("TRC016 warning", "if x.shape[1] > 5:\n    x = x[:, :5]\nreturn x"),
    ("TRC016 warning", "y = x\nfor i in range(x.shape[0]):\n    y = y + i\nreturn y"),
    ("TRC016 warning", "return F.pad(x, (0, max(x.shape[0], x.shape[1])))"),
    ("TRC016 warning", "while x.shape[1] > 2:\n    x = x[:, ::2]\nreturn x"),
]  # fmt: skip
INIT = """
self.w = nn.Parameter(torch.ones(3))
self.i = torch.tensor([0, -1])
self.fc = nn.Linear(3, 3)
self.layers = nn.ModuleList([nn.Linear(3, 3), nn.ReLU()])
self.by_name = nn.ModuleDict({'a': nn.ReLU()})
self.size = 3
self.extra = None
self.lstm = nn.LSTM(3, 3)
self.table = {'a': torch.ones(3)}
self.list = [1, 2, 3]
self.yes = torch.tensor(True)
self.many = [torch.ones(2), torch.ones(3)]
self.kept, self.total, self.record, self.later = torch.zeros(3), 0.0, [], lambda: self.kept
self.usual = nn.ModuleList([nn.Softplus(2), nn.AvgPool2d(2), nn.PairwiseDistance(), nn.CosineSimilarity()])
"""
WITHOUT_FINDING = [
    "return F.softplus(x) + F.softplus(x, beta=2, threshold=20) + self.usual[0](x)",
    "return F.avg_pool2d(x, 2, ceil_mode=True, divisor_override=None) + self.usual[1](x)",
    "return torch.cdist(x, x) + torch.cdist(x, x, p=4) + torch.cdist(x, x, 2.0)",
    "return F.pairwise_distance(x, x * 2) + self.usual[2](x, x * 2)",
    "return F.cosine_similarity(x, x * 2, dim=-1) + self.usual[3](x, x * 2)",
    "return x.std(1) + x.var(1, correction=2) + torch.std(x, 1, False)",
    "return x[: x.shape[0] // 2] * (self.w // 2)",
    "return F.batch_norm(x, None, None, training=True) + F.batch_norm(x, self.w, self.w)",
    "return F.batch_norm(x, self.w, self.w, None, None, self.training)",
    "return x.scatter_reduce(1, self.i[None], x, 'mean')",  # the export fails
    "more = {'p': 1.0}\nreturn torch.cdist(x, x, **more)",
    "return x * (self.size and 2 or 1)",
    "return self.extra(x) if x.dim() == 9 else x",
    "y = self.extra or x\nreturn y",
    "return x * [1.0, 2.0][self.size - 2]",
    "return x * self.list[self.i[0]]",
    "return x * (x > 0)",
    "return x * (not self.size)",
    "return x.reshape(x.shape[0], -1)",
    "b, c = x.shape\nreturn x.reshape(b, c // 1)",
    "n = x.shape[1]\nn = n + 1\nreturn x * n",
    "n = x.shape[1]\nn += 1\nreturn x * n",
    "if x.dim() == 3:\n    x = x.flatten(1)\nreturn x",
    "if x.dtype == torch.float16:\n    x = x.float()\nreturn x",
    "if x.shape[1] != self.size:\n    raise ValueError(x.shape)\nreturn x",
    "assert x.shape[1] == 3\nreturn x",
    "torch._assert(x.shape[1] == 3, 'size')\nreturn x",
    "if self.extra is not None:\n    x = x * self.extra.item()\nreturn x",
    "if self.training:\n    x = F.dropout(x, 0.5, True)\nreturn x",
    "return F.dropout(x, 0.5, self.training)",
    "return F.dropout(x, 0.0)",
    "return x * self.w.max().item()",
    "return x * float(self.w[0])",
    "return x * len(self.w)",
    "if torch.are_deterministic_algorithms_enabled():\n    return x * 2\nreturn x",
    "if torch.is_grad_enabled() and torch.is_tensor(x):\n    return x * 2\nreturn x",
    "for w in self.many:\n    x = x * len(w)\nreturn x",
    "x = torch.utils.checkpoint.checkpoint(self.fc, x)\nreturn x",
    "return x[..., [2, 1, 0]]",
    "return x[:, -1]",
    "return x[:, torch.tensor([0, 1])]",
    "return x[torch.arange(x.shape[0]), x.argmax(1)]",
    "y = x * 1\ny[:, 0] = 1.0\nreturn y",
    "y = x * 1\ny[:, :2] = torch.tensor([1.0, 2.0])\nreturn y",
    "y = x * 1\ny[:, 1:2] = x.mean(1, keepdim=True)\nreturn y",
    "y = x * 1\ny[:, i := 0] = x[:, 1]\nreturn y",
    "y = x * 1\ny[x > 0] = x.mean()\nreturn y",
    "y = x * 1\ny[:, 1:3] = x[:, 3:4].expand(-1, 2)\nreturn y",
    "if not torch.jit.is_scripting() and not torch.jit.is_tracing():\n    print('eager')\nreturn x",
    "if torch.jit.is_tracing():\n    return x\nelse:\n    return x",
    "if torch.jit.is_scripting():\n    return x * 2\nreturn x",
    "y = self.fc(x)\nif not torch.jit.is_tracing():\n    loss = y.mean()\n    print(loss)\nreturn y",
    "y = self.fc(x)\nif not torch.jit.is_tracing():\n    self.loss = F.mse_loss(y, x)\nreturn y",
    "y = self.fc(x)\nif self.size and not torch.jit.is_tracing():\n    hits = (y > 0).sum()\n"
    "    self.seen = hits\n    self.record.append(hits)\nreturn y",
    "y = self.fc(x)\nself.loss = None if torch.jit.is_tracing() else y.mean()\nreturn y",
    "y = self.fc(x)\nif torch.jit.is_tracing():\n    return y\nself.loss = y.mean()\nreturn y",
    "y = self.fc(x)\nif not torch.jit.is_tracing():\n    with torch.no_grad():\n"
    "        for part in y.unbind():\n            self.total += part.sum()\nreturn y",
    "for layer in self.layers:\n    x = layer(x)\nreturn x",
    "for i in range(len(self.layers)):\n    x = self.layers[i](x)\nreturn x",
    "for name, layer in self.by_name.items():\n    x = layer(x)\nreturn x",
    "for i in range(3):\n    x = x * i\nreturn x",
    "parts = x.chunk(3, 1)\nif len(parts) > 1:\n    return parts[0]\nreturn x",
    "total = 0\nfor part in x.split(1, 1):\n    total = total + part\nreturn total",
    "return x.detach() * 2",
    "return torch.where(x > 0, x, x * 2)",
    "q, k = x.unbind(1)\nreturn q * k",
    "import math\nreturn x * math.sqrt(self.size)",
    "return x.new_zeros(x.shape[0], 3) + x",
    "y = x if isinstance(x, Tensor) else x[0]\nreturn y",
    "out = []\nout.append(x)\nreturn torch.cat(out)",
    "f = lambda t: t * 2\nreturn f(x)",
    "def twice(t):\n    return t * 2\nreturn twice(x)",
    "try:\n    y = self.fc(x)\nexcept RuntimeError:\n    raise\nreturn y",
    "with torch.no_grad():\n    y = self.fc(x)\nreturn y",
    "y = '%d rows' % x.shape[0]\nprint(y, f'{x.shape[0]}')\nreturn x",
    "return x * (self.size if 'a' in self.table and 'b' not in [1] else 1)",
    "return x * max(self.size, 2) * min(1, 2)",
    "if hasattr(self, 'nothing') or not self.yes:\n    x = x[x.sum() > 0]\nreturn x",
    "if isinstance(self.size, (int, float)) and not isinstance(x, (list, tuple)):\n    x = x * 2\nreturn x",
    "kinds = [k for k in self.table if k]\nreturn x * len(kinds)",
    "if 1 < self.size < 4 and self.size is not None:\n    return x\nreturn x if x.sum() > 0 else -x",
    "if self.size == 3 or x.sum() > 0:\n    return x\nreturn -x",
    "y = x\ndel y\nreturn x",
    "with torch.autocast('cpu') as context:\n    return x",
    "size = torch.Size((3, 3))\nreturn x.expand(size)",
    "return torch.Tensor([1.0]) * x",
    "return x * self.list[1:][0] * self.list[-1]",
    "for i, layer in enumerate(self.layers):\n    x = layer(x) * i\nreturn x",
    "for one in sorted(self.list):\n    x = x * one\nreturn x",
    "y = getattr(self, 'fc')(x)\nreturn y",
    "shape = list(x.shape)\nshape[0] = -1\nreturn x.reshape(shape)",
    "return x[None, :, None].squeeze(0)",
    "y = x * 1\ny[:, 1:3] += 1.0\nreturn y",
    "i = -self.i[:1] if self.size else ~self.i\nreturn x[:, i]",
    "match self.size:\n    case 3:\n        x = x * 2\nreturn x",
]  # fmt: skip


@pytest.mark.rows(5)
@pytest.mark.parametrize(("expected", "body"), WITH_FINDING, ids=[b[:60] for _, b in WITH_FINDING])
def test_code_has_exactly_one_finding(expected: str, body: str) -> None:
    report = lint(body, init=INIT)
    assert finding_titles(report) == [expected]
    (finding,) = report.active
    assert finding.message
    assert finding.rewrite
    assert finding.expression in " ".join(body.split())


@pytest.mark.parametrize("body", WITHOUT_FINDING, ids=[body[:60] for body in WITHOUT_FINDING])
def test_correct_code_has_no_finding(body: str) -> None:
    assert finding_titles(lint(body, init=INIT)) == []


@pytest.mark.parametrize(
    ("arguments", "body", "expected"),
    [
        ("x, n: int", "if n > 2:\n    x = x * 2\nreturn x", []),
        ("x, n=3", "if n > 2:\n    x = x * 2\nreturn x", []),
        ("x, flag: bool = False", "return x * 2 if flag else x", []),
        ("x, m=None", "if m is not None:\n    x = x * m\nreturn x", []),
        ("x, m: Tensor | None = None", "if m is None:\n    m = x\nreturn m", []),
        ("x, m: 'torch.Tensor'", "if m.sum():\n    x = x * 2\nreturn x", ["TRC008 error"]),
        ("x, m", "if m.sum():\n    x = x * 2\nreturn x", ["TRC008 error"]),
        ("x: list[Tensor]", "return torch.cat(x) / len(x)", []),
        ("x: tuple[Tensor, ...]", "for t in x:\n    y = t\nreturn y", []),
        ("x, size: torch.Size", "return x.reshape(int(size[0]), -1)", ["TRC004 warning"]),
        ("x, mode: str", "return x * 2 if mode == 'a' else x", ["TRC012 warning"]),
        ("x, mode='a'", "return x * 2 if mode == 'a' else x", ["TRC012 warning"]),
        ("x: dict[str, Tensor]", "return x['a']", ["TRC012 warning"]),
        ("x", "return x['a']", ["TRC012 warning"]),
        ("x, *, n: int = 2, m: Tensor", "return m if m.sum() > n else x", ["TRC008 error"]),
        ("x, n: 'not python ('", "return x * 2 if n else x", ["TRC008 error"]),
        ("x, n: Literal['a', 'b'] = 'a'", "return x * 2 if n == 'a' else x", ["TRC012 warning"]),
        ("x, n: Optional[int] = None", "return x * 2 if n else x", []),
        ("x, n: np.ndarray", "return x * 2 if n.sum() else x", []),
        ("x, *more, **options", "return x * 2 if options['a'] else more[0]", []),
        ("*xs", "return torch.cat(xs) / len(xs)", []),
    ],
)
def test_annotations_and_defaults_set_argument_types(arguments, body, expected) -> None:
    assert finding_titles(lint(body, arguments=arguments)) == expected


@pytest.mark.parametrize(
    ("strategy", "body", "expected"),
    [
        ("dynamo", "return F.softplus(x, threshold=1) + x // 2 + torch.cdist(x, x, p=1.0)", []),
        ("dynamo", "y = F.avg_pool2d(x, 2, divisor_override=3)\nreturn F.logsigmoid(y)",
         ["TRC017 error", "TRC018 warning"]),
        ("dynamo", "return x.scatter_reduce(1, self.i[None], x, 'mean')", ["TRC017 error"]),
        ("dynamo", "return x.scatter_reduce(1, self.i[None], x, reduce='sum')", []),
        ("dynamo", "return (x > 0).long().mean(1, dtype=torch.float32)", ["TRC018 warning"]),
        ("dynamo", "return x.mean(1) + x.mean(dim=1, dtype=None)", []),
        ("dynamo", "return torch.logaddexp(x, -x)", ["TRC018 warning"]),
        ("dynamo", "return F.batch_norm(x, self.w * 1, self.w * 1, training=True)",
         ["TRC017 error"]),
        ("dynamo", "y = F.batch_norm(x, None, None, training=True)\n"
         "return y + F.batch_norm(x, self.w, self.w, None, None, self.training)", []),
        ("traced", "return torch.logaddexp(x, -x) + x.mean(1, dtype=torch.float32)", []),
        ("scripted", "y = F.softplus(x, threshold=1)\nreturn y + x // 2",
         ["TRC017 error", "TRC018 warning"]),
        ("scripted", "if x.sum() > 0:\n    x = x * 2\nreturn x", []),
        ("dynamo", "if x.sum() > 0:\n    x = x * 2\nreturn x", []),
        ("direct", "return x.max().item()", ["TRC002 error"]),
        ("scripted", "return x / len(x)", []),
        ("scripted", "if torch.jit.is_scripting():\n    return x * 2\nreturn x", ["TRC014 error"]),
        ("scripted", "if torch.jit.is_tracing():\n    return x * 2\nreturn x", []),
        ("dynamo", "if torch.compiler.is_exporting():\n    return x * 2\nreturn x", ["TRC014 error"]),
        ("dynamo", "return F.dropout(x)", ["TRC013 error"]),
        ("scripted", "y = x\nif x.sum() > 0:\n    y = x.unsqueeze(0)\nreturn y", ["TRC015 error"]),
        ("scripted", "if x.sum() > 0:\n    return x.flatten(1).sum(1)\nelse:\n    return x.flatten(1)",
         ["TRC015 error"]),
        ("scripted", "y = x\nif x.sum() > 0:\n    y = x * 2\nreturn y", []),
        ("traced", "y = x\nif x.sum() > 0:\n    y = x.unsqueeze(0)\nreturn y", ["TRC008 error"]),
    ],
)  # fmt: skip
def test_findings_depend_on_the_export_strategy(strategy, body, expected) -> None:
    assert finding_titles(lint(body, strategy=strategy, init=INIT)) == expected


@pytest.mark.parametrize(
    ("strategy", "made", "expected"),
    [
        ("traced", "nn.Softplus(threshold=1)", ["TRC017 error"]),
        ("dynamo", "nn.Softplus(threshold=1)", []),
        ("dynamo", "nn.AvgPool2d(2, divisor_override=3)", ["TRC017 error"]),
        ("direct", "nn.AvgPool3d(2, divisor_override=3)", ["TRC017 error"]),
        ("traced", "nn.PairwiseDistance(p=1.0)", ["TRC017 error"]),
        ("scripted", "nn.PairwiseDistance(eps=0.5)", ["TRC017 error"]),
        ("traced", "nn.CosineSimilarity(eps=0.5)", ["TRC018 warning"]),
        ("dynamo", "nn.LogSigmoid()", ["TRC018 warning"]),
        ("traced", "nn.Sequential(nn.ReLU(), nn.LogSigmoid())", ["TRC018 warning"]),
        ("traced", "nn.Sequential(nn.Softplus(), nn.AvgPool2d(2))", []),
    ],
)
def test_settings_of_torch_modules_are_checked(strategy, made, expected) -> None:
    report = lint("return self.one(x, x)", init=f"self.one = {made}", strategy=strategy)
    assert finding_titles(report) == expected
    assert all(finding.module.startswith("one") for finding in report.findings)
    assert all(finding.path.startswith("torch/nn/") for finding in report.findings)
