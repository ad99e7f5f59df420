"""Write docs/checks.md: what every check asks, and what each of its codes says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from gate.decision.catalog import (
    CHECKS,
    COMMON,
    MISMATCHES,
    NOTES,
    PROBLEMS,
    REASONS,
    TITLES,
    CheckSpec,
    CodeSpec,
)
from gate.decision.faults import (
    ACCOUNTS,
    DETAILS,
    FAULTS,
    FINDINGS,
    OPTIMIZERS,
    OUTCOMES,
    SEAMS,
    WEIGHTS,
    FaultSpec,
)

PAGE = Path(__file__).parents[1] / "docs" / "checks.md"

_INTRODUCTION = """\
# Checks

A decision is a list of checks. Each has a name, a verdict, its numbers and a *code*: what was
found. Names and codes are stable; texts may change. This page lists every text, with `<...>` in
the place of values. `gate check --json` prints them as `explanation` and `remedy`.
[Metrics](metrics.md) has the formulas in full.

## Terms

- `c`, `r`, `r64`: the output of the ONNX file, of the model in float32, and of the model in float64
  (the float64 reference). `a`, `b`: two runs of one runtime on the same samples.
- floor: the float32 rounding error of the model itself. `× rounding`: an error in units of it; a
  correct file has about 1.
- random rounding: PyTorch with each operation rounded up or down at random, which shows what
  rounding alone changes.
- spread: the standard deviation of the output over the samples.
- provider: an execution provider of ONNX Runtime, such as `CUDAExecutionProvider`.
- probe: an input that is not among the samples, such as zeros, other signs, another batch size.
- baked in: a value or a branch of the traced example that the exporter wrote as a constant.
- release, part, chain: a model of several ONNX files, one of these files, and the Python code that
  connects them.
- champion: the version that serves now.
- consumer: a program other than the training code that turns pictures into tensors.
- waived: the policy does not require it, so the check does not refuse the file.

`python -m handbook.checks_page` writes this page from `gate/decision/catalog.py` and
`gate/decision/faults.py`.
"""

_FAULTS = """\
## Faults

If a check fails, `gate check` compares the layers of the file with those of the model and names the
first layer that is wrong although its inputs are right. The code is `fault_code` of the
localization, with `variant` of its `fault_params`; `<details>` are listed below. The texts are in
`cause` and `remedy` of `--json`.
"""


def page() -> str:
    """Return the page in Markdown."""
    lines, shown = [_INTRODUCTION], dict[str, CheckSpec]()
    for name, spec in CHECKS.items():
        same = next((other for other, one in shown.items() if one.codes == spec.codes), None)
        shown.setdefault(same or name, spec)
        lines += [f"## {name}{'…' if name.endswith('_') else ''}", "", *_check(spec, same)]
    common = {code: spec.text for code, spec in COMMON.items()}
    lines += ["## All checks with a number", "", *_list(common), ""]
    lines += ["## Problems", "", "What a text lists as problems:", "", *_list(PROBLEMS), ""]
    lines += ["## Notes", "", "Sentences that follow a text:", "", *_list(NOTES), ""]
    lines += ["## Outputs that do not match", "", "What `wrong_outputs` of `runtime` says:", ""]
    lines += _specs(MISMATCHES)
    lines += ["", "## Reasons", "", "What a text has as its reason:", "", *_list(REASONS), ""]
    lines += ["## Nodes and tensors", "", "What a finding in the graph says of its node or tensor:"]
    lines += ["", *_list(FINDINGS), ""]
    lines += ["Parts of the sentence about the weights:", "", *_list(WEIGHTS), ""]
    lines += [_FAULTS, *_specs(FAULTS), "", "### Details of faults", "", *_list(DETAILS), ""]
    lines += ["### Sentences about layers", "", *_specs(OUTCOMES), ""]
    lines += ["### Parts of a release", "", *_specs(SEAMS), ""]
    lines += ["### Optimizers of ONNX Runtime", "", *_list(OPTIMIZERS), ""]
    lines += ["## Findings", "", "Parts of the sentences of findings:", "", *_list(ACCOUNTS)]
    return "\n".join(lines) + "\n"


def _check(spec: CheckSpec, same: str | None) -> Iterator[str]:
    """Yield the lines of a check. `same`: the one above that has the same codes."""
    yield f"{spec.meaning} Cause: *{TITLES[spec.cause]}*."
    yield ""
    if spec.formula is not None:
        unit = f" ({spec.unit})" if spec.unit else ""
        yield f"Number: `{spec.formula}`{unit}. {spec.why}"
        yield ""
    yield f"What to do: {_plain(spec.remedy)}"
    yield ""
    if same is not None:
        yield f"Its codes are those of `{same}`."
        yield ""
        return
    yield from _specs({name: each for name in spec.codes if (each := spec.code(name))})
    yield ""


def _specs(specs: Mapping[str, CodeSpec | FaultSpec]) -> Iterator[str]:
    for code, spec in specs.items():
        remedy = f" What to do: {_plain(spec.remedy)}" if spec.remedy else ""
        yield f"- `{code}`: {_plain(spec.text)}{remedy}"


def _list(texts: Mapping[str, str]) -> Iterator[str]:
    for code, text in texts.items():
        yield f"- `{code}`: {_plain(text)}"


def _plain(template: str) -> str:
    """Return a text with `<name>` for its fields."""
    text = re.sub(r"\{(\w+)(?::[^{}]*)?\}", r"<\1>", template.replace("<", "&lt;"))
    text = text.replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("{{", "{").replace("}}", "}")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
