"""Accounts of what localisation found: the layer to blame, and where NaN begins."""

from __future__ import annotations

import re

from gate.decision.remedies import OPTIMISER, REMEDIES
from gate.records.localisation import Localisation, OptimiserBlame, listed
from gate.story.group import worst_of
from gate.story.scene import Account, Scene, broken, capital, clean, short, with_number
from gate.story.wording import printable
from gate.story.words import measure


def located(scene: Scene, found: Localisation) -> Account:
    """Which layer is to blame, or the optimiser."""
    if scene.group.cause == "optimiser" and found.blame is not None and found.blame.names:
        return _optimiser(scene, found.blame)
    if found.fault is None:
        return Account(
            found.first_divergence or None, with_number(found.cause, scene.number), found.remedy
        )
    blamed, text = _fault(found, found.fault)
    if found.probe is not None:
        # Code that is right on the samples: what only shows beyond them is a limit of it.
        limits = found.fault.startswith("code in")
        remedy = REMEDIES["probe_beyond"] if limits else found.remedy
        return Account(blamed, _on_probe(scene, text, found.probe), remedy)
    if scene.group.cause == "optimiser":
        text = f"{blamed or 'The file'}: ONNX Runtime's optimiser changes what it computes"
        text = f"{with_number(text, scene.number)}; with optimisations off the file agrees"
        if found.blame is None:
            return Account(blamed, text, OPTIMISER)
        return Account(blamed, clean(f"{text}. {found.blame.text}"), found.remedy)
    return Account(blamed, with_number(text, scene.number), found.remedy)


def _on_probe(scene: Scene, text: str, probe: str) -> str:
    """What no sample shows, with the number of the input that does."""
    check = next((c for c in scene.group.ordered if c.name == f"probe_{probe}"), scene.shown)
    text = f"{text}; the samples agree, and the input '{probe}' shows it"
    return with_number(text, measure(check))


def _optimiser(scene: Scene, blame: OptimiserBlame) -> Account:
    """Which optimiser it is, what it made of which nodes, and what comes of it."""
    text = f"ONNX Runtime's {blame.text}; with optimisations off the file agrees"
    shows = short(broken(blame.raises)) if blame.raises else scene.number
    return Account(listed(blame.names), with_number(text, shows), blame.remedy)


def _fault(found: Localisation, fault: str) -> tuple[str | None, str]:
    """What is to blame by its name, and what is wrong with it."""
    named = re.match(r"`([^`]+)`", fault)
    blamed = printable(named[1] if named else found.first_divergence or "") or None
    text = printable(fault).replace("`", "").replace(" of the file", "", 1)
    if blamed is None:
        text = capital(text)
    elif not text.startswith(blamed):
        text = f"{blamed}: {text}"
    places = {row.title for row in found.layers if row.verdict == "source" and row.module}
    if len(places) > 1:
        text += f" (the first of {len(places)} places)"
    return blamed, text


def nonfinite(scene: Scene) -> Account:
    """How much is NaN or infinite, and where that begins."""
    check = worst_of(scene.group.checks, "finite") or scene.shown
    text, found = (
        capital(check.explanation.partition(";")[0].rstrip(".")),
        scene.group.localisation,
    )
    if found is None:
        return Account(check.output, clean(text), check.remedy)
    if found.fault is None:
        return Account(check.output, clean(f"{text}. {found.cause}"), found.remedy)
    blamed, fault = _fault(found, found.fault)
    return Account(blamed or check.output, clean(f"{text}. It begins here: {fault}"), check.remedy)
