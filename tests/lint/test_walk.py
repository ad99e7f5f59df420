"""The rules follow reachable code, locate findings, and report code that they can't read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gate.lint.lint import lint_model
from gate.lint.rules import RULES
from gate.records.export import LEVELS, at_least
from tests.lint.written import create_module, finding_titles, import_module, lint

DOCS = Path(__file__).parents[2] / "docs" / "lint"


def create_net(text: str) -> nn.Module:
    return import_module(text).Net().eval()


@pytest.mark.parametrize(
    "text",
    [
        """
        def helper(t):
            return t.max().item()
        class Net(nn.Module):
            def forward(self, x):
                return x * helper(x)
        """,
        """
        class Net(nn.Module):
            def forward(self, x):
                return x * self.helper(x)
            def helper(self, t):
                return t.max().item()
        """,
        """
        class Net(nn.Module):
            def forward(self, x):
                return x * self.helper(x)
            @staticmethod
            def helper(t):
                return t.max().item()
        """,
        """
        class Net(nn.Module):
            def forward(self, x):
                return x * self.helper(x)
            @classmethod
            def helper(cls, t):
                return t.max().item()
        """,
        """
        class Base(nn.Module):
            def forward(self, x):
                return x.max().item()
        class Net(Base):
            def forward(self, x):
                return x * super().forward(x)
        """,
        """
        class Inner(nn.Module):
            def forward(self, x):
                return x * x.max().item()
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Sequential(nn.ReLU(), Inner())
            def forward(self, x):
                return self.inner(x)
        """,
        """
        import functools
        def helper(t, n):
            return t.max().item()
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.helper = functools.partial(helper, n=2)
            def forward(self, x):
                return x * self.helper(x)
        """,
        """
        import functools
        def doubled(function):
            @functools.wraps(function)
            def inside(*arguments):
                return function(*arguments)
            return inside
        class Net(nn.Module):
            @doubled
            def forward(self, x):
                return x * x.max().item()
        """,
        """
        class Net(nn.Module):
            def forward(self, x):
                def helper():
                    return x.max().item()
                return x * helper()
        """,
        """
        class Net(nn.Module):
            def forward(self, x):
                helper = lambda t: t.max().item()
                return x * helper(x)
        """,
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.helper = lambda t: t.max().item()
            def forward(self, x):
                return x * self.helper(x)
        """,
        """
        class Helper:
            def __call__(self, t):
                return t.max().item()
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.helper = Helper()
            def forward(self, x):
                return x * self.helper(x)
        """,
        """
        class Net(nn.Module):
            @property
            def reader(self):
                return lambda t: t.max().item()
            def forward(self, x):
                self.last = x * 2
                return x * self.reader(self.last)
        """,
        """
        class Net(nn.Module):
            def forward(self, x):
                return self.again(x, 3)
            def again(self, x, n):
                if n == 0:
                    return x * x.max().item()
                return self.again(x, n - 1)
        """,
    ],
)
def test_calls_into_user_code_are_followed(text: str) -> None:
    report = lint_model(create_net(text))
    assert finding_titles(report) == ["TRC002 error"]
    assert report.active[0].expression.endswith("max().item()")


def test_finding_location_is_the_same_in_all_formats() -> None:
    model = create_net(
        """
        class Inner(nn.Module):
            def forward(self, x):
                return x * (
                    x.max()
                    .item())
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.ModuleList([Inner()]), Inner()
            def forward(self, x):
                return self.two(self.one[0](x))
        """
    )
    (finding,) = lint_model(model).active
    lines = Path(
        import_module.__globals__["sys"].modules[type(model).__module__].__file__
    ).read_text()
    assert finding.line == lines.splitlines().index("            x.max()") + 1
    # the path is not relative to the import path
    assert finding.path == f"{type(model).__module__}.py"
    assert finding.expression == "x.max() .item()"
    assert finding.module in ("one.0", "two")
    assert finding.page == "docs/lint/TRC002.md"


@pytest.mark.parametrize(
    ("comment", "suppressed"),
    [
        ("# noqa: TRC002", True),
        ("# noqa:TRC002", True),
        ("# the scale  # noqa: TRC001, TRC002", True),
        ("# noqa: E501,TRC002", True),
        ("# noqa: TRC001", False),
        ("# noqa: TRC0021", False),
        ("# noqa", False),
        ("# TRC002", False),
    ],
)
def test_noqa_comment_suppresses_its_rule_on_its_line(comment: str, suppressed: bool) -> None:
    report = lint(f"y = x / x.max().item()  {comment}\nreturn y / x.min().item()")
    assert [finding.suppressed for finding in report.findings] == [suppressed, False]
    assert len(report.suppressed) == suppressed
    assert len(report.active) == 2 - suppressed


def test_levels_are_ordered() -> None:
    report = lint("if x.shape[0] > 1:\n    x = x[:, torch.tensor([-1])]\nreturn x / len(x)")
    assert finding_titles(report) == ["TRC016 warning", "TRC009 note", "TRC005 error"]
    assert [len(report.refused(level)) for level in LEVELS] == [1, 2, 3]
    assert [len(at_least(level)) for level in LEVELS] == [1, 2, 3]


# --- Code that can't be read ----------------------------------------------------------------------


def test_torchscript_is_listed_as_unread() -> None:
    with pytest.warns(FutureWarning):
        scripted = torch.jit.script(nn.Linear(2, 2))
    report = lint_model(nn.Sequential(scripted))
    assert (report.functions, [unread.name for unread in report.unread]) == (0, ["0"])
    assert "TorchScript" in report.unread[0].reason


def test_compiled_code_is_listed_as_unread() -> None:
    model = create_module("return self.compiled(x)")
    model.compiled = type("Compiled", (), {"__call__": math.sqrt, "__module__": "extension"})()
    (unread,) = lint_model(model).unread
    assert unread.reason == "it is compiled code, without Python source"


def test_generated_code_is_listed_as_unread() -> None:
    space: dict[str, object] = {"__name__": "nowhere", "nn": nn}
    exec("class Net(nn.Module):\n    def forward(self, x):\n        return x.item()", space)
    (unread,) = lint_model(space["Net"]()).unread
    assert "nowhere.Net.forward" in unread.name
    assert "is not there" in unread.reason


def test_changed_source_file_is_listed_as_unread() -> None:
    model = create_module("return x.max().item()")
    path = Path(import_module.__globals__["sys"].modules[type(model).__module__].__file__)
    path.write_text("# nothing\n" + path.read_text())
    (unread,) = lint_model(model).unread
    assert "was not found" in unread.reason


def test_code_that_breaks_a_rule_is_listed_as_unread(monkeypatch) -> None:
    from gate.lint import forward_visitor

    def stumble(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(forward_visitor, "arithmetic", stumble)
    (unread,) = lint_model(create_module("return x + 1")).unread
    assert unread.reason == "the rules can't follow it: RuntimeError: odd"


# --- Real models ----------------------------------------------------------------------------------


def test_lint_does_not_run_or_change_the_model() -> None:
    model = create_module("self.seen = x\nraise RuntimeError('run')").train()
    before = dict(vars(model))
    assert finding_titles(lint_model(model)) == []
    assert dict(vars(model)) == before
    assert model.training


# --- The pages ------------------------------------------------------------------------------------


def test_rules_and_pages_match() -> None:
    assert {path.stem for path in DOCS.glob("TRC*.md")} == set(RULES)
    table = (DOCS / "README.md").read_text()
    for code, rule in RULES.items():
        page = (DOCS / f"{code}.md").read_text()
        assert page.startswith(f"# {code}: {rule.title}\n")
        for heading in ("## The wrong file", "## Instead"):
            assert heading in page
        assert f"| [{code}]({code}.md) | {rule.title} | {rule.level} |" in table


LOSS = """
class Head(nn.Module):
    def forward(self, x):
        return x * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.scale = Head(), 1.0

    def forward(self, x):
        y = self.head(x)
        if not torch.jit.is_tracing():
            self.loss, self.scale = y.mean(), y.max()
            self.log("loss", self.loss)
        return y

    def log(self, name, value):
        print(name, value)

    def training_step(self, x):
        self(x)
        return self.loss * self.scale
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", []),
        ("return x * 2\n", "return x * 2 + getattr(self, 'loss', 0)\n", ["TRC014 error"]),
        ("y = self.head(x)\n", "y = self.head(x) * self.factor\n", ["TRC014 error"]),
        ("y = self.head(x)\n", "y = self.head(x)\n        self.training_step(x)\n",
         ["TRC014 error"]),
    ],
)  # fmt: skip
def test_guarded_attribute_counts_when_forward_reads_it(before, after, expected) -> None:
    factor = "\n    @property\n    def factor(self):\n        return self.scale\n"
    text = LOSS.replace(before, after) + factor if before else LOSS
    assert finding_titles(lint_model(import_module(text).Net().eval())) == expected
