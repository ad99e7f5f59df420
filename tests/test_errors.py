"""Error messages with text of other libraries' exceptions."""

import pytest

from gate.errors import first_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("one line", "one line"),
        ("first.\nsecond", "first."),
        ("\n  \n  indented  \nmore", "indented"),
        ("", "no message"),
        (" \n ", "no message"),
    ],
)
def test_first_meaningful_line(message, line):
    assert first_line(ValueError(message)) == line


def test_empty_message():
    assert first_line(ValueError(), empty="ValueError") == "ValueError"
