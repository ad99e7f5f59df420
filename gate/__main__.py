"""`python -m gate`: the same as the command `gate`."""

from gate.cli import run

run()
