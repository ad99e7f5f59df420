"""The commands that come after `gate check`, with the files and options of this one in them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gate.policy.policy import Policy
    from gate.story.story import Story


def addressed(story: Story, options: Mapping[str, Any], *, policy: Policy) -> Story:
    """With the names of the files in its commands; what judges again is this command line. No
    password stands in them: reports are kept and sent. `policy`: by which it was judged."""
    from gate.storage.redaction import without_passwords

    named = {
        "MODEL.onnx": options["model"],
        "SAMPLES": without_passwords(options["inputs"]),
        "CHECKPOINT": options["checkpoint"],
        "DIR": options["report"],
        "SPEC": options["preprocessing"],
        "PICTURES": next(iter(options["pictures"]), None),
        "NAME": options["name"] or options["against"],
    }
    story = story.with_files({word: str(name) for word, name in named.items() if name is not None})
    line, first = click.get_current_context().obj, story.steps[0].command or ""
    if first.startswith("gate promote "):
        story = story.with_command("gate promote ", " ".join([first, *_of_promote(options)]))
    commands = [step.command for step in story.steps if step.command]
    looking = [command for command in commands if command.startswith("gate locate ")]
    if looking:
        whole = " ".join([looking[0], *_of_locate(options, policy)])
        story = story.with_command("gate locate ", whole)
    again = [without_passwords(word) for word in line.arguments if word != "--json"] if line else []
    if story.headline.verdict == "PASS":  # only what was tried out is to be judged again
        again = _untried(again)
    return story.with_command("gate check ", shlex.join(["gate", *again])) if again else story


def _untried(words: list[str]) -> list[str]:
    """The command line without --set, by the policy into which the values are to be written."""
    pairs = zip(["", *words], words, strict=False)
    kept = [word for before, word in pairs if before != "--set" and word.split("=")[0] != "--set"]
    return kept if "--policy" in kept else [*kept, "--policy", "POLICY"]


def _of_locate(options: Mapping[str, Any], policy: Policy) -> list[str]:
    """The options by which gate locate sees the same numbers, quoted for a shell."""
    built_in = options["policy"] is None and policy.precision != "exact"
    given = {
        "--preprocessing": options["preprocessing"],
        "--policy": options["policy"],
        "--precision": policy.precision if built_in else None,
    }
    return [f"{name} {shlex.quote(str(value))}" for name, value in given.items() if value]


def _of_promote(options: Mapping[str, Any]) -> list[str]:
    """The options without which gate promote would look elsewhere, quoted for a shell."""
    from click.core import ParameterSource

    from gate.storage.redaction import without_passwords

    source = click.get_current_context().get_parameter_source("state")
    given = {
        "--policy": options["policy"],
        "--preprocessing": options["preprocessing"],
        "--tracking-uri": options["tracking_uri"],
        "--key": options["key"],
        "--state": options["state"] if source is ParameterSource.COMMANDLINE else None,
    }
    return [
        f"{name} {shlex.quote(without_passwords(str(value)))}"
        for name, value in given.items()
        if value is not None
    ]
