from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from gate.report.terminal import add_row, print_table


def test_a_cell_steers_no_terminal_and_a_styled_one_stays_as_it_is() -> None:
    shown = print_table(
        ("name", "n"), [("a\x1b[31m\nb", Text("two  spaces"))], right=("n",), title="of"
    )
    add_row(shown, ("c", "1"))
    stream = io.StringIO()
    Console(file=stream, width=60).print(shown)
    lines = [line.rstrip() for line in stream.getvalue().splitlines() if line.strip()]
    assert lines[0] == "of"
    assert lines[1].split() == ["name", "n"]
    assert [line.strip() for line in lines[3:]] == [
        "a�[31m b   two  spaces",
        "c                    1",
    ]
