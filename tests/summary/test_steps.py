"""What to do next."""

from __future__ import annotations

import re
import shlex

import pytest

from gate.cli import COMMANDS, main
from gate.decision.catalog import TITLES
from gate.records.instruments import GraphFinding
from gate.summary.summarize import steps_of, summarize
from tests.report.samples import failed, passed


@pytest.mark.parametrize("cause", sorted(TITLES))
def test_every_cause_has_a_command_that_is_there(cause: str) -> None:
    decision, evidence = failed()
    steps = list(steps_of(decision, evidence, cause))  # type: ignore[arg-type]
    assert steps
    for step in steps:
        assert step.command is not None
        program, command, *_ = shlex.split(step.command)
        assert program == "gate"
        assert command in COMMANDS


@pytest.mark.parametrize("cause", sorted(TITLES))
def test_every_command_takes_the_options_that_it_is_given(
    cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in steps_of(*failed(), cause):  # type: ignore[arg-type]
        words = shlex.split(step.command or "")[1:]
        named = [word for word in words if re.fullmatch("[a-z]+", word)]
        assert main([*named[: 2 if words[0] == "preprocess" else 1], "--help"]) == 0
        told = capsys.readouterr().out
        assert [word for word in words if word.startswith("--") and word not in told] == []


def test_what_passed_is_promoted_next() -> None:
    (step,) = summarize(*passed()).steps
    assert step.command == "gate promote MODEL.onnx --name NAME --report DIR"


def test_a_quantized_file_is_promoted_beside_the_exact_one() -> None:
    decision, evidence = passed()
    assert evidence.graph is not None
    finding = GraphFinding(code="quantized", place="node", detail="8 nodes compute in integers")
    graph = evidence.graph.model_copy(update={"findings": (finding,)})
    (step,) = steps_of(decision, evidence.model_copy(update={"graph": graph}), "passed")
    assert step.command is not None
    assert "gate promote EXACT.onnx" in step.command
    assert "--twin MODEL.onnx --twin-report DIR" in step.command


def test_the_command_that_judged_judges_again() -> None:
    story = summarize(*failed()).with_command(
        "gate check ", "gate check it.onnx --policy mine.yaml"
    )
    assert story.steps[-1].command == "gate check it.onnx --policy mine.yaml"
    assert not story.steps[0].command.startswith("gate check")  # type: ignore[union-attr]


def test_the_names_of_files_are_filled_in_and_quoted() -> None:
    story = summarize(*passed()).with_files({"MODEL.onnx": "my model.onnx", "DIR": "out"})
    assert story.steps[0].command == "gate promote 'my model.onnx' --name NAME --report out"
