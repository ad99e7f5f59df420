"""Code examples on the pages of the lint rules.

The wrong example has the finding, the rewrite does not, and both compute the same in PyTorch.
"""

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
from tests.lint.written import import_module

DOCS = Path(__file__).parents[2] / "docs" / "lint"
LAYERS = """\
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

"""
X = torch.linspace(-3, 4, 24).reshape(4, 6)
RANDOM_RULES = {"TRC013"}
"""Rules whose wrong example is random, so that outputs can't be compared."""


def blocks(code: str, heading: str) -> list[str]:
    """Return the code blocks below a heading."""
    below = (
        (DOCS / f"{code}.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    )
    return re.findall(r"^```python\n(.*?)^```$", below, re.MULTILINE | re.DOTALL)


def create_net(code: str) -> nn.Module:
    """Return a model with these methods; `...` in its constructor is replaced."""
    text = code.replace("    ...\n", "    super().__init__()\n")
    network = import_module(f"{LAYERS}class Net(Layers):\n{textwrap.indent(text, ' ' * 4)}").Net
    model: nn.Module = network("plain") if "__init__" in code else network()
    return model.eval()


def compute(model: nn.Module) -> torch.Tensor:
    """Return the output for `X`, which is used for every input."""
    names = inspect.signature(model.forward).parameters
    arguments_by_name = {"image": X, "mask": X}
    if "ids" in names:
        arguments_by_name = {"image": X.abs().long()}
    arguments = (
        (arguments_by_name,)
        if "inputs" in names
        else arguments_by_name.values()
        if {"image", "ids"} & {*names}
        else (X,)
    )
    with torch.no_grad():
        output = model(*arguments)
    return output["scores"] if isinstance(output, dict) else output


def find_codes(model: nn.Module, code: str) -> list[str]:
    strategy = sorted(RULES[code].strategies)[0]
    report = lint_model(model, strategy=strategy)
    assert not report.unread
    return [finding.code for finding in report.active]


@pytest.mark.parametrize("code", RULES)
def test_page_example_has_finding_and_rewrite_has_none(code: str) -> None:
    (wrong,) = blocks(code, "The wrong file")
    first, *more = blocks(code, "Instead")
    assert code in find_codes(create_net(wrong), code)
    for right in (first, *more):
        assert code not in find_codes(create_net(right), code)
        compute(create_net(right))
    if code not in RANDOM_RULES:
        torch.testing.assert_close(
            compute(create_net(first)), compute(create_net(wrong)), rtol=1e-4, atol=1e-5
        )
