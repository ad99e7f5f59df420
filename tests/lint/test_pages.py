"""Code examples on the pages of the lint rules: the wrong example has the finding, the rewrite does
not, and both compute the same in PyTorch."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from gate.lint.lint import lint_model
from gate.lint.rules import RULES
from tests.lint.written import module

DOCS = Path(__file__).parents[2] / "docs" / "lint"
LAYERS = """\
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

"""
X = torch.linspace(-3, 4, 24).reshape(4, 6)
RANDOM = {"TRC013"}
"""Whose wrong code draws at random: no two answers agree."""


def blocks(code: str, heading: str) -> list[str]:
    """The code below a heading."""
    below = (
        (DOCS / f"{code}.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    )
    return re.findall(r"^```python\n(.*?)^```$", below, re.MULTILINE | re.DOTALL)


def net(code: str) -> nn.Module:
    """A model with these methods; `...` of its constructor is what makes the layers."""
    text = code.replace("    ...\n", "    super().__init__()\n")
    made = module(f"{LAYERS}class Net(Layers):\n{textwrap.indent(text, ' ' * 4)}").Net
    model: nn.Module = made("plain") if "__init__" in code else made()
    return model.eval()


def answer(model: nn.Module) -> torch.Tensor:
    """On `X`; of two inputs both are it."""
    names = inspect.signature(model.forward).parameters
    given = {"image": X, "mask": X}
    if "ids" in names:
        given = {"image": X.abs().long()}
    arguments = (
        (given,) if "inputs" in names else given.values() if {"image", "ids"} & {*names} else (X,)
    )
    with torch.no_grad():
        found = model(*arguments)
    return found["scores"] if isinstance(found, dict) else found


def found(model: nn.Module, code: str) -> list[str]:
    strategy = sorted(RULES[code].strategies)[0]
    report = lint_model(model, strategy=strategy)
    assert not report.unread
    return [finding.code for finding in report.active]


@pytest.mark.parametrize("code", RULES)
def test_page_example_has_finding_and_rewrite_has_none(code: str) -> None:
    (wrong,) = blocks(code, "The wrong file")
    first, *more = blocks(code, "Instead")
    assert code in found(net(wrong), code)
    for right in (first, *more):
        assert code not in found(net(right), code)
        answer(net(right))
    if code not in RANDOM:
        torch.testing.assert_close(answer(net(first)), answer(net(wrong)), rtol=1e-4, atol=1e-5)
