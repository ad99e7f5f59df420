"""Instruction sets, as kernels list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.reference import environment

X86 = """processor\t: 0
model name\t: AMD EPYC 9R14
flags\t\t: fpu smep sse4_2 avx avx2 avx512f avx512_vnni avx_vnni amx_tile amx_int8 erms
processor\t: 1
model name\t: AMD EPYC 9R14
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes asimddp sve sve2 i8mm bf16 sb\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86, ("amx_int8", "amx_tile", "avx2", "avx512_vnni", "avx512f", "avx_vnni")),
        (ARM, ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2")),
        ("flags : fpu sse\n", ()),
        ("model name\t:\nflags\t\t:\nbugs\t\t: avx2\n", None),
        ("flags\t\t: \nbugs\t\t: avx2\n", None),
        ("", None),
        (None, None),
    ],
)
def test_flags_of_interest(
    text: str | None, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cpuinfo"
    if text is not None:
        place.write_text(text)
    monkeypatch.setattr(environment, "_CPUINFO", place)
    model, flags = environment.describe_processor()
    assert flags == expected
    assert model
    assert (model == "AMD EPYC 9R14") == (text == X86)
