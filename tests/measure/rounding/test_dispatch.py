import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from gate.reference.random_rounding import RandomRounding
from gate.reference.float64 import in_double
with RandomRounding(0), in_double():
    torch.rand(3) * 2
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.proof
def test_dispatch_modes_do_not_import_the_compiler():
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "False"
