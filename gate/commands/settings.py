"""`--set PLACE=VALUE`: a value of the policy that is tried out."""

from __future__ import annotations

from typing import Any

import click


class Setting(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """`place.in.the.policy=value`, the value in YAML."""

    name = "setting"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """The two. Fails with a usage error."""
        if isinstance(value, tuple):  # click converts what it has converted once more
            return value
        place, is_set, text = str(value).partition("=")
        if not is_set or not all(place.split(".")):
            self.fail(
                f"{value!r}: expected PLACE=VALUE, such as runtimes.ort-cpu.bounds.noise_ratio=2.",
                param,
                ctx,
            )
        return place, text


SETTINGS = click.option(
    "--set", "settings", type=Setting(), multiple=True, metavar="PLACE=VALUE",
    help="Try out a value in the place of the policy's: runtimes.ort-cpu.bounds.noise_ratio=2. The "
    "decision names it, and promotes nothing. Repeatable.",
)  # fmt: skip
