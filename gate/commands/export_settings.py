"""The settings of an export: those of a file, or the defaults, with what options say in their
place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import click

from gate.commands.given import SETTINGS_FILE
from gate.commands.options import STRATEGIES

if TYPE_CHECKING:
    from gate.records.strategy import ExportSettings

Command = TypeVar("Command", bound=Callable[..., Any])
_AXIS = re.compile(r"(?P<name>\S+):(?P<axis>\d+)=(?P<label>[^\s=]+)")
_DOMAIN = re.compile(r"(?P<domain>\S+)=(?P<version>\d+)")
_ALL = "all"
_PLAIN = ("strategy", "opset", "autograd_inlining", "operator_export_type")
_SWITCHES = ("keep_initializers_as_inputs", "verbose")
_TYPES = ("ONNX", "ONNX_ATEN", "ONNX_ATEN_FALLBACK", "ONNX_FALLTHROUGH")


class SettingOptions(TypedDict):
    """The options, as parsed. None: as the file or the default has it."""

    strategy: str | None
    opset: int | str | None
    dynamic: tuple[str, ...]
    output_names: str | None
    settings: Path | None
    lint: bool
    keep_initializers_as_inputs: bool
    custom_opset: tuple[str, ...]
    autograd_inlining: bool | None
    export_modules_as_functions: tuple[str, ...]
    operator_export_type: str | None
    verbose: bool


class _Opset(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    name = "opset"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """`auto` or a number; which ones, the settings know."""
        if value == "auto":
            return "auto"
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither auto nor a number", param, ctx)
        return int(value)


_OPTIONS = (
    click.option(
        "--strategy", type=click.Choice(["ladder", *STRATEGIES]),
        help="ladder (default): the first of the others that carries.",
    ),
    click.option(
        "--opset", type=_Opset(), metavar="13|auto",
        help="auto (default without --settings): the lowest from 13 on that works.",
    ),
    click.option(
        "--dynamic", multiple=True, metavar="NAME:AXIS=LABEL",
        help="An axis of an input or output that may have any size, beside the batch. Those of "
        "outputs follow; one that is named has to move with another size. Repeatable.",
    ),
    click.option(
        "--output-names", metavar="A,B",
        help="In the order of the returned tensors. Default: the keys and fields of what forward "
        "returns, in their order, else output_0, output_1, or output.",
    ),
    click.option(
        "--settings", type=SETTINGS_FILE, metavar="FILE.yaml",
        help="YAML with an 'export:' section, such as params.yaml; options go before it.",
    ),
    click.option(
        "--lint/--no-lint", default=True, show_default=True,
        help="Try no strategy that gets the model's source wrong by the rules of gate lint.",
    ),
    click.option(
        "--keep-initializers-as-inputs", is_flag=True,
        help="List the weights among the inputs, too: a caller may give others.",
    ),
    click.option(
        "--custom-opset", multiple=True, metavar="DOMAIN=VERSION",
        help="The version of a domain that is not ONNX's own; not with dynamo. Repeatable.",
    ),
    click.option(
        "--autograd-inlining/--no-autograd-inlining", default=None,
        help="Whether an autograd.Function is written by what it computes (default), or left to "
        "a symbolic function for prim::PythonOp; not with dynamo.",
    ),
    click.option(
        "--export-modules-as-functions", multiple=True, metavar="all|CLASS",
        help="Write the modules of this class as functions of the file; with --strategy direct. "
        "Repeatable.",
    ),
    click.option(
        "--operator-export-type", type=click.Choice(_TYPES),
        help="ONNX (default), or write operators that ONNX has not as they are: no runtime of the "
        "gate runs such a file. Not with dynamo, nor with a ladder.",
    ),
    click.option(
        "--verbose", is_flag=True,
        help="Keep what the exporter tells of its work as MODEL.onnx.export.log.",
    ),
)  # fmt: skip


def setting_options(command: Command) -> Command:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def settings_of(given: SettingOptions) -> ExportSettings:
    """The settings. Raises PolicyError and click's BadParameter."""
    from pydantic import ValidationError

    from gate.errors import PolicyError
    from gate.records.strategy import ExportSettings
    from gate.storage.yaml_section import first_problem, load_section

    path = given["settings"]
    base = load_section(ExportSettings, path, "export") if path else ExportSettings(opset="auto")
    try:
        return ExportSettings(**{**dict(base), **dict(_changes(given, base))})
    except ValidationError as error:
        raise PolicyError(first_problem(error)) from error


def _changes(given: SettingOptions, base: ExportSettings) -> Iterator[tuple[str, Any]]:
    plain = {name: given.get(name) for name in _PLAIN}
    yield from ((name, value) for name, value in plain.items() if value is not None)
    yield from ((name, True) for name in _SWITCHES if given.get(name))
    if not given["lint"]:
        yield "lint", "off"
    if (names := given["output_names"]) is not None:
        yield "output_names", tuple(names.split(","))
    if given["dynamic"]:
        axes = {name: dict(labels) for name, labels in base.dynamic_axes.items()}
        for text in given["dynamic"]:
            name, axis, label = _axis(text)
            axes.setdefault(name, {})[axis] = label
        yield "dynamic_axes", axes
    if given["custom_opset"]:
        yield "custom_opsets", {**base.custom_opsets, **dict(map(_opset, given["custom_opset"]))}
    if classes := given["export_modules_as_functions"]:
        yield "export_modules_as_functions", True if _ALL in classes else classes


def _axis(text: str) -> tuple[str, int, str]:
    parsed = _AXIS.fullmatch(text)
    if parsed is None:
        raise click.BadParameter(
            f"{text!r} is not NAME:AXIS=LABEL, such as image:2=height", param_hint="--dynamic"
        )
    return parsed["name"], int(parsed["axis"]), parsed["label"]


def _opset(text: str) -> tuple[str, int]:
    parsed = _DOMAIN.fullmatch(text)
    if parsed is None:
        raise click.BadParameter(
            f"{text!r} is not DOMAIN=VERSION, such as com.microsoft=1", param_hint="--custom-opset"
        )
    return parsed["domain"], int(parsed["version"])
