"""What the gate makes of the errors of others."""

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
def test_the_first_line_that_says_something(message, line):
    assert first_line(ValueError(message)) == line


def test_what_stands_for_an_empty_message():
    assert first_line(ValueError(), empty="ValueError") == "ValueError"
