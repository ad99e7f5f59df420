"""The processor: its model, and the instruction sets by which libraries choose their kernels."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_OF_INTEREST = re.compile(
    r"avx2|avx512\w*|avx10\w*|avx_vnni\w*|amx_\w+"  # x86
    r"|neon|asimd|asimdhp|asimddp|asimdfhm|sve\w*|sme2?|smei\w+|smef\w+|i8mm|bf16"  # ARM
)
"""Of the hundred that a kernel lists. Without AVX-512, or with AMX, other kernels round otherwise,
and take other times."""


def describe_processor() -> tuple[str, tuple[str, ...] | None]:
    """Its model, and its flags of interest by name; None where the kernel does not list them."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = _field(text, "model name")
    flags = _field(text, "flags") or _field(text, "Features")
    listed = None if flags is None else {f for f in flags.split() if _OF_INTEREST.fullmatch(f)}
    return (
        model or platform.processor() or platform.machine() or "unknown",
        None if listed is None else tuple(sorted(listed)),
    )


def _field(text: str, name: str) -> str | None:
    """The first one of this name: cores of one machine are alike, or nobody can say more."""
    found = re.search(rf"^{name}[ \t]*:[ \t]*(\S.*)$", text, flags=re.MULTILINE)
    return found.group(1).strip() if found else None
