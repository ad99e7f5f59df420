"""Frozen findings of `gate lint --json`, without line numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.corpus.architecture import ARCHITECTURES
from gate import cli
from tests.frozen.store import assert_frozen
from tests.lint.rule_examples import CASES

TORCHVISION = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s",
    "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x1_0",
    "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t",
    "vgg11_bn", "vit_b_16", "wide_resnet50_2", "optical_flow:raft_small",
    "video:r3d_18",
)  # fmt: skip
FIELDS = ("code", "level", "path", "module", "expression", "suppressed")
RULES = ("message", "rewrite")


def factory(make: Any) -> str:
    """Return the name of a factory; that of a partial has no module path."""
    return f"{make.__module__}:{getattr(make, '__name__', '<lambda>')}"


def torchvision(name: str) -> str:
    folder, _, function = name.rpartition(":")
    return f"torchvision.models{'.' if folder else ''}{folder}:{function}"


SETS = {
    "hazards": [(factory(m), case.strategy) for case in CASES for m in (case.wrong, case.right)],
    "corpus": [
        (factory(each.make), strategy)
        for each in ARCHITECTURES.values()
        for strategy in ("traced", "scripted", "dynamo")
    ],
    "torchvision": [(torchvision(name), "traced") for name in TORCHVISION],
}


@pytest.mark.parametrize(
    "name", ["hazards", "corpus", pytest.param("torchvision", marks=pytest.mark.proof)]
)
def test_lint(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rules: dict[str, list[str]] = {}
    text = ""
    for where, strategy in dict.fromkeys(SETS[name]):
        if "<lambda>" in where:
            continue
        with torch.device("meta"):  # weights of large models are not needed
            code = cli.main(["lint", where, "--strategy", strategy, "--json"])
        report = json.loads(capsys.readouterr().out)
        text += f"{where} {strategy}: exit code {code}\n"
        text += "".join(lines(report))
        for result in report.get("findings", ()):
            rules[result["code"]] = [result[field] for field in RULES]
    text += "".join(f"{code}: {' | '.join(reported)}\n" for code, reported in sorted(rules.items()))
    assert_frozen(f"lint/{name}.txt", text)


def lines(report: dict[str, Any]) -> Iterator[str]:
    for result in report.get("findings", ()):
        yield f"  {' | '.join(str(result.get(field)) for field in FIELDS)}\n"
    for unread in report.get("unread", ()):
        yield f"  not read: {unread}\n"
    if "error" in report:
        yield f"  {report['error']['type']}: {report['error']['message']}\n"
