"""What each rule says, spelling by spelling; and what no rule says a word about."""

from __future__ import annotations

import pytest

from tests.export.lint.written import lint, told

ANNOUNCED = [
    ("TRC001 error", "return x * float(x.max())"),
    ("TRC001 error", "return x[int(x.argmax())]"),
    ("TRC001 error", "return x * math.sqrt(x.sum())"),
    ("TRC001 error", "return x * np.mean(x)"),
    ("TRC001 error", "return x + torch.tensor(x.sum())"),
    ("TRC001 error", "return x + torch.tensor([x[0, 0], 1.0])"),
    ("TRC001 error", "y = x.cpu().detach()\nreturn x + torch.from_numpy(y.numpy())"),
    ("TRC002 error", "return x / x.std().item()"),
    ("TRC002 error", "scale = [row.item() for row in x.unbind()]\nreturn x * scale[0]"),
    ("TRC003 error", "return x * torch.tensor(x[0].tolist())"),
    ("TRC004 error", "return x.reshape(int(x.shape[0]), -1)"),
    ("TRC004 error", "return x / float(x.size(0))"),
    ("TRC004 error", "b, c = x.shape\nreturn x.reshape(int(b), c)"),
    ("TRC004 error", "return x.reshape([int(n) for n in x.shape])"),
    ("TRC004 error", "return x / math.sqrt(x.shape[0])"),
    ("TRC004 warning", "return x / math.sqrt(x.shape[-1])"),
    ("TRC004 warning", "b, c = x.shape\nreturn x / int(c)"),
    ("TRC004 error", "return x * torch.tensor(x.shape[0])"),
    ("TRC004 error", "return x / x.shape.numel()"),
    ("TRC004 error", "return x / math.sqrt(x.numel())"),
    ("TRC004 warning", "return x / x.shape[1:].numel()"),
    ("TRC004 warning", "b, h, w = x.shape\nreturn x * int(h * w)"),
    ("TRC004 error", "return x * round(x.shape[0] / 2)"),
    ("TRC004 error", "n = x.shape[0] if self.size else 1\nreturn x / int(-(-n))"),
    ("TRC004 error", "s = x.shape + x.shape\nreturn x / int(s[0])"),
    ("TRC004 warning", "s = x.shape[1:]\nreturn x / int(s[0])"),
    ("TRC004 error", "return x / np.prod(x.shape)"),
    ("TRC005 error", "return x / len(x)"),
    ("TRC005 error", "y = F.relu(x)\nreturn y / len(y[0])"),
    ("TRC006 error", "return x.data * 2"),
    ("TRC006 error", "y = x * 1\ny.data = x + 1\nreturn y"),
    ("TRC006 warning", "return x * self.w.data"),
    ("TRC007 error", "n = x.shape[1]\nm = n\nm += 1\nreturn x * (m / n)"),
    ("TRC007 error", "s = x.shape\nn = s[0]\nn *= 2\nreturn x * (n / s[0])"),
    ("TRC007 error", "a, b = sizes = x.shape[0], x.shape[1]\na += 1\nreturn x * (a / sizes[0])"),
    ("TRC008 error", "if x.sum() > 0:\n    x = x * 2\nreturn x"),
    ("TRC008 error", "if bool((x > 0).any()):\n    x = x * 2\nreturn x"),
    ("TRC008 error", "return x * 2 if x.max() > 1 else x"),
    ("TRC008 error", "while not torch.all(x < 1):\n    x = x / 2\nreturn x"),
    ("TRC008 error", "if self.w is not None and x.sum() > 0:\n    x = x * 2\nreturn x"),
    ("TRC008 error", "y = 0\nfor row in x:\n    y = y + row\nreturn y"),
    ("TRC008 error", "y = 0\nfor i, row in enumerate(x):\n    y = y + row * i\nreturn y"),
    ("TRC008 error", "return torch.stack([row for row in x])"),
    ("TRC008 error", "return x * sum(x)"),
    ("TRC008 error", "return x * max(x.sum(), x.mean())"),
    ("TRC008 error", "y = x\nfor _ in range(x.argmax()):\n    y = y * 2\nreturn y"),
    ("TRC008 error", "a = 0\na = a + x\nif a.sum() > 0:\n    return x\nreturn a"),
    ("TRC008 error", "for a, b in zip(x, self.many):\n    y = a * b.sum()\nreturn y"),
    ("TRC008 error", "return x * 2 if any(x) else x"),
    ("TRC008 error", "rows = list(x)\nreturn rows[0]"),
    ("TRC008 error", "y = x\nwhile True:\n    y = y / 2\n    if y.max() < 1:\n        break\nreturn y"),
    ("TRC008 error", "if torch.is_nonzero(x.sum()):\n    x = x * 2\nreturn x"),
    ("TRC008 error", "match x.argmax():\n    case 0:\n        x = x * 2\nreturn x"),
    ("TRC008 error", "try:\n    y = self.fc(x)\nexcept RuntimeError:\n    y = x\nif y.sum() > 0:\n    return x\nreturn y"),
    ("TRC008 error", "return {k: x for k in [1] if x.sum() > 0}[1]"),
    ("TRC008 error", "*rest, last = x.unbind(1)\nreturn last * 2 if last.sum() > 0 else last"),
    ("TRC008 error", "if (y := x.sum()) > 0:\n    return y\nreturn x"),
    ("TRC008 error", "(lambda t: t)(x)\nif not x.any():\n    x = x * 2\nreturn x"),
    ("TRC008 error", "parts = [*x.unbind(1)]\nreturn torch.cat(parts) if parts[0].sum() > 0 else x"),
    ("TRC008 error", "import torch.nn.functional as G\ny = G.relu(x)\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "from torch import relu as r\ny = r(x)\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "y = self.layers[0](x)\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "y = self.by_name['a'](x)\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "y = x + self.table['a']\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "def f(*ts, k=1, **more):\n    return ts[0] * k\ny = f(*[x, x], k=2)\nreturn y * 2 if y.sum() > 0 else y"),
    ("TRC008 error", "y: Tensor = x * 2\nreturn y if y.sum() > 0 else x"),
    ("TRC008 error", "y = torch.maximum(x, x.new_zeros(1))\nreturn y if y.sum() > 0 else x"),
    ("TRC008 error", "y, (h, c) = self.lstm(x)\nreturn y if y.sum() > 0 else x"),
    ("TRC008 error", "y = x.max(1)[0]\nreturn y if y.sum() > 0 else x"),
    ("TRC008 error", "y = torch.cat([x, x])\nreturn y if y.sum() > 0 else x"),
    ("TRC008 note", "if torch.isnan(x).any():\n    raise ValueError('NaN')\nreturn x"),
    ("TRC009 error", "return x[torch.tensor([0, -1]), torch.tensor([1, 1])]"),
    ("TRC009 error", "return x[[0, -1], [1, 1]]"),
    ("TRC009 error", "return x[self.i, self.i]"),
    ("TRC009 note", "return x[:, torch.tensor([-1, 0])]"),
    ("TRC009 warning", "return x[torch.arange(4), x.argmax(1) - 1]"),
    ("TRC010 error", "y = x * 1\ny[:, None] = x[:, None]\nreturn y"),
    ("TRC010 error", "y = x * 1\ny[:, torch.tensor([[0, 1], [2, 3]])] = 1.0\nreturn y"),
    ("TRC010 error", "y = x.reshape(-1, 2, 3) * 1\ny[[0], :, [1]] = 1.0\nreturn y"),
    ("TRC010 warning", "y = x * 1\ny[torch.tensor([[0, 1], [2, 3]])] = 1.0\nreturn y"),
    ("TRC010 error", "y = x * 1\nreturn y.index_put_((None, torch.tensor([[0], [1]])), x[:, :1])"),
    ("TRC011 error", "y = x * 1\ny[:, :3] = x[:, 0].unsqueeze(1)\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[:, :3] = x[:, -1:]\nreturn y"),
    ("TRC011 error", "y = torch.zeros(4, 6)\ny[:, :3] = x.new_ones(3) * x.sum()\nreturn y"),
    ("TRC011 error", "y = x.flatten(1)\ny[:, :3] = torch.stack([x.sum(), x.sum(), x.sum()])\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[:, 1:3] = x[:, 3:4] - x.mean((0, 1), keepdim=True)\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[:, 1:3] = x.mean(1, keepdim=True)\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[:, :3] = x.mean(0)[:3]\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[:, torch.tensor([0, 1])] = x[:, 2:3]\nreturn y"),
    ("TRC011 error", "y = x * 1\ny[x[:, 0] > 0] = x.mean()\nreturn y"),
    ("TRC012 warning", "return {'a': x}"),
    ("TRC012 warning", "out = {}\nout['a'] = x\nreturn out"),
    ("TRC012 warning", "return dict(a=x)"),
    ("TRC012 error", "return x, 'cat'"),
    ("TRC013 error", "return F.dropout(x)"),
    ("TRC013 error", "return F.dropout(x, 0.1)"),
    ("TRC013 error", "return nn.functional.dropout2d(x, p=0.1)"),
    ("TRC013 error", "return F.dropout(x, 0.1, training=True)"),
    ("TRC013 error", "return torch.dropout(x, 0.1, True)"),
    ("TRC014 error", "if torch.jit.is_tracing():\n    return x * 2\nreturn x"),
    ("TRC014 error", "if not torch.jit.is_tracing():\n    x = x * 2\nreturn x"),
    ("TRC014 error", "return x * 2 if torch.jit.is_tracing() else x"),
    ("TRC014 error", "traced = torch.jit.is_tracing()\nif traced:\n    x = x + 1\nreturn x"),
    ("TRC014 error", "if torch.jit.is_tracing():\n    x.mul_(2)\nreturn x"),
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
"""
RIGHT = [
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


@pytest.mark.parametrize(("expected", "body"), ANNOUNCED, ids=[b[:60] for _, b in ANNOUNCED])
def test_it_is_announced_once(expected: str, body: str) -> None:
    report = lint(body, init=INIT)
    assert told(report) == [expected]
    (finding,) = report.active
    assert finding.message
    assert finding.rewrite
    assert finding.expression in " ".join(body.split())


@pytest.mark.parametrize("body", RIGHT, ids=[body[:60] for body in RIGHT])
def test_nothing_is_said(body: str) -> None:
    assert told(lint(body, init=INIT)) == []


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
def test_arguments_are_what_they_are_declared_to_be(arguments, body, expected) -> None:
    assert told(lint(body, arguments=arguments)) == expected


@pytest.mark.parametrize(
    ("strategy", "body", "expected"),
    [
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
def test_another_strategy_has_other_hazards(strategy, body, expected) -> None:
    assert told(lint(body, strategy=strategy)) == expected
