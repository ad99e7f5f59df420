"""The library reference: the public names of `gate`, rendered by mkdocstrings."""

from __future__ import annotations

import gate

PAGE = "reference/library.md"
_HEAD = """\
# The library

The public API; everything else is private and may change. Modules are imported on first use, so
`import gate` is cheap. `Reference` and `EvaluationData` are the inputs. `check` measures, decides
and explains, and returns an `EvaluationResult`; `collect_evidence` only measures.
"""
_FIRST = ("check", "Reference", "EvaluationData", "EvaluationResult", "Policy", "Decision")


def library_page() -> str:
    """Return Markdown for mkdocstrings: the main names first, then the others alphabetically. The
    names are not imported, because the site is also built without PyTorch."""
    names = [*_FIRST, *(name for name in gate.__all__ if name not in _FIRST)]
    parts = [f"::: {gate._MODULES[name]}.{name}" for name in names]
    return "\n\n".join([_HEAD, *parts]) + "\n"
