"""Deploying and rolling back: prove everything first, then move one link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from gate.bounded.limits import ChildLimits
from gate.deploy.disk import make_folder, point, settle, storage_errors
from gate.deploy.manifest import EXACT, MANIFEST, Earlier, Manifest, Slot, check_name
from gate.deploy.source import SlotSource
from gate.deploy.staging import NotDeployed, compute, prove, stage, store_staged
from gate.deploy.store import Store
from gate.errors import StorageError
from gate.storage.atomic import sync

__all__ = ["Deployment", "SlotSource", "Store", "deploy", "rollback", "serves"]

Outcome = Literal["deployed", "unchanged", "refused", "rolled_back"]


@dataclass(frozen=True)
class Deployment:
    """What came of it."""

    outcome: Outcome
    name: str
    manifest: Manifest | None
    """Of what serves now; None: nothing does."""
    reason: str
    judged: bool = True
    """False: it was refused because nobody could find out within the limits whether it is good."""


def deploy(store: Store, name: str, slots: Mapping[str, SlotSource]) -> Deployment:
    """Let these slots serve as `name`, all together or not at all; `exact` must be among them.

    Every slot is fetched into a folder of the same file system with its size capped, hashed and
    compared with its expected digest, loaded in ONNX Runtime, and its golden vectors computed;
    then it is made durable, renamed into the store, and last the link of the name is replaced.
    `unchanged`: whole and the same bytes serve already. `refused`: a slot is not what was
    expected, or does not compute what it should; what served before serves still.

    Two at once wait for each other. Killed at any moment, the name points at a whole release,
    and the next call finishes the job. Raises StorageError, and whatever fetching raises.
    """
    check_name(name, what="deployed model")
    for slot in slots:
        check_name(slot, what="slot")
    if EXACT not in slots:
        raise StorageError(
            f"a release of {name} needs the slot '{EXACT}', given are {sorted(slots)}. "
            "Name the model itself, too."
        )
    with storage_errors(store.root), store.alone():
        store.prune(name)  # what somebody who died did not get done
        live = store.live(name)
        if live is not None and serves(store, name, slots):
            return Deployment("unchanged", name, live, f"release {live.release} serves it already")
        try:
            staged = {slot: stage(source, store.workshop / slot) for slot, source in slots.items()}
        except NotDeployed as refusal:
            return Deployment("refused", name, live, str(refusal), judged=refusal.judged)
        mixed = _mixed({slot: entry.slot for slot, entry in staged.items()})
        if mixed is not None:
            return Deployment("refused", name, live, mixed)
        for entry in staged.values():
            store_staged(store, entry)
        served = {slot: entry.slot for slot, entry in staged.items()}
        previous = () if live is None else (live.earlier(), *live.previous)
        manifest = _go_live(store, name, served, previous=previous)
    return Deployment("deployed", name, manifest, _describe(manifest))


def rollback(store: Store, name: str, *, limits: ChildLimits | None = None) -> Deployment:
    """Let the release serve again that served before, with the same checks on its bytes.

    It becomes a new release, so that the numbers go up; calling again goes further back.
    `refused`: there is none, or its bytes are not (any more) good. `limits`: within which a child
    process computes them; None: in this process. Raises StorageError.
    """
    check_name(name, what="deployed model")
    with storage_errors(store.root), store.alone():
        store.prune(name)  # what somebody who died did not get done
        live = store.live(name)
        if live is None or not live.previous:
            reason = "there is no earlier release to go back to"
            return Deployment("refused", name, live, reason)
        target = live.previous[0]
        slots = store.release(name, target.release).slots
        for label, slot in slots.items():
            problem = prove(store, slot) or compute(store, slot, limits)
            if problem is not None:
                reason = f"release {target.release} can't serve again: {label}: {problem}"
                return Deployment("refused", name, live, reason)
        manifest = _go_live(store, name, slots, previous=live.previous[1:], back_to=target.release)
    return Deployment("rolled_back", name, manifest, _describe(manifest))


def serves(
    store: Store, name: str, slots: Mapping[str, SlotSource], *, thoroughly: bool = True
) -> bool:
    """Whether these very slots serve as `name`, and no others; `thoroughly`: with whole bytes.

    Raises StorageError where the manifest of what serves is damaged.
    """
    live = store.live(name)
    if live is None or live.slots.keys() != slots.keys():
        return False
    if not all(_is(live.slots[slot], source) for slot, source in slots.items()):
        return False
    return not thoroughly or all(prove(store, slot) is None for slot in live.slots.values())


def _mixed(slots: Mapping[str, Slot]) -> str | None:
    """Why the slots can't be replaced as one: a consumer of each runs the same parts."""
    exact = slots[EXACT].parts
    for label, slot in slots.items():
        if slot.parts.keys() != exact.keys():
            here, there = (", ".join(sorted(parts)) for parts in (slot.parts, exact))
            return (
                f"the slot {label} has {f'the parts {here}' if here else 'one file'}, the slot "
                f"{EXACT} {f'the parts {there}' if there else 'one file'}: deploy a release with "
                "the twin of that release, a file with that of the file"
            )
    return None


def _is(slot: Slot, source: SlotSource) -> bool:
    vectors, spec = slot.golden_sha256, slot.preprocessing
    return (
        slot.sha256 == source.sha256
        and source.golden_sha256 in (None, vectors)
        and (vectors is not None or not source.golden_required)
        and source.preprocess_sha256 == (None if spec is None else spec.digest())
    )


def _go_live(
    store: Store,
    name: str,
    slots: Mapping[str, Slot],
    *,
    previous: Sequence[Earlier],
    back_to: int | None = None,
) -> Manifest:
    manifest = Manifest(
        name=name,
        release=1 + max(store.releases(name), default=0),
        slots=dict(slots),
        rolled_back_to=back_to,
        deployed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        previous=tuple(previous[: store.keep]),
    )
    folder = _release_folder(store, manifest)
    point(store.live_link(name), f"../releases/{name}/{folder.name}")
    store.prune(name)
    return manifest


def _release_folder(store: Store, manifest: Manifest) -> Path:
    """The release's own folder, complete before it is there."""
    made = store.workshop / "release"
    made.mkdir()
    manifest.save(made / MANIFEST)
    for label, slot in manifest.slots.items():
        (made / label).symlink_to(f"../../../store/{slot.sha256.hex}", target_is_directory=True)
    settle(made)
    releases = store.root / "releases" / manifest.name
    make_folder(releases)
    short = manifest.slots[EXACT].sha256.short
    folder = releases / f"{manifest.release}-{short}"
    made.rename(folder)
    sync(releases)
    return folder


def _describe(manifest: Manifest) -> str:
    slots = ", ".join(f"{label} {slot.sha256.short}" for label, slot in manifest.slots.items())
    bare = [label for label, slot in manifest.slots.items() if slot.golden is None]
    warning = f"; without golden vectors: {', '.join(bare)}" if bare else ""
    return f"release {manifest.release} serves: {slots}{warning}"
