"""The rules follow reachable code, locate findings, and report code that they can't read."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from gate.lint.lint import lint_model
from tests.lint.written import create_module, finding_titles, import_module, lint


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
        class Inner(nn.Module):
            def forward(self, x):
                return x * x.max().item()
        class Table(dict):
            def __getitem__(self, name):
                return super().__getitem__(name)()
        TABLE = Table(inner=Inner)
        class Net(nn.Module):
            def forward(self, x):
                return TABLE['inner'](x)
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
    report = lint_model(import_module(text).Net().eval())
    assert finding_titles(report) == ["TRC002 error"]
    assert report.active[0].expression.endswith("max().item()")


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


def test_changed_source_file_is_listed_as_unread() -> None:
    model = create_module("return x.max().item()")
    path = Path(inspect.getfile(type(model)))
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


def test_lint_does_not_run_or_change_the_model() -> None:
    model = create_module("self.seen = x\nraise RuntimeError('run')").train()
    before = dict(vars(model))
    assert finding_titles(lint_model(model)) == []
    assert dict(vars(model)) == before
    assert model.training
