"""What whoever has CI's password makes of files: of records, of statements, and of bytes."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gate.policy.sections import Bounds
from gate.records.layout import DECISION_STATEMENT, RECORDS
from gate.registry.release import Release
from tests import builders
from tests.end_to_end.forging import FORGED, PLAIN, STATEMENTS, Forge, Victim
from tests.end_to_end.hands import MLMODEL
from tests.registry.releases import failing_release, onnx_file, release


def edited(name: str, **values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def replaced(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def replace_in(folder: Path) -> None:
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new))

    return replace_in


def without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def changed(*changes: Callable[[Path], object], **signing: Any) -> Forge:
    """A right release, signed by CI, and then changed."""
    return lambda victim: victim.put(victim.release(FORGED, **signing), *changes)


def signed_by(name: str, **signing: Any) -> Forge:
    return lambda victim: victim.put(victim.release(FORGED, key=victim.hands.keys[name], **signing))


def from_another(*names: str) -> Forge:
    """Files of another right release of the same model, in the place of these."""

    def forge(victim: Victim) -> str:
        other = victim.folder_of(victim.release(FORGED + 1))

        def exchange(folder: Path) -> None:
            for name in names:
                target = folder / name
                shutil.rmtree(target) if target.is_dir() else target.unlink()
                copy = shutil.copytree if (other / name).is_dir() else shutil.copyfile
                copy(other / name, target)

        return victim.put(victim.release(FORGED), exchange)

    return forge


def under_a_trusted_id(victim: Victim) -> str:
    """Signed by a stranger; the signatures name CI's key."""

    def rename(folder: Path) -> None:
        for name in STATEMENTS:
            envelope = json.loads((folder / name).read_text())
            for signature in envelope["signatures"]:
                signature["keyid"] = victim.hands.keys["ci"].public.key_id
            (folder / name).write_text(json.dumps(envelope))

    return victim.put(victim.release(FORGED, key=victim.hands.keys["stranger"]), rename)


def failing(victim: Victim, **signing: Any) -> Release:
    """What CI measured, and signed that it does not pass."""
    made = failing_release(onnx_file(victim.fresh() / "model.onnx", seed=FORGED))
    return victim.signed(made, **signing)


def embellished(*names: str) -> Forge:
    """A signed FAIL, of which these records were edited into a PASS."""

    def forge(victim: Victim) -> str:
        bad = failing(victim)
        good = victim.signed(release(bad.onnx_path, policy=PLAIN))
        told = victim.folder_of(good)

        def edit(folder: Path) -> None:
            for name in names:
                shutil.copyfile(told / RECORDS / name, folder / RECORDS / name)

        folder = victim.folder_of(bad)
        edit(folder)
        return victim.hands.put(folder, good)  # with the tags of a PASS

    return forge


def said_otherwise(victim: Victim) -> str:
    """The signature of a FAIL, and PASSED in its payload."""

    def edit(folder: Path) -> None:
        path = folder / RECORDS / DECISION_STATEMENT
        envelope = json.loads(path.read_text())
        payload = base64.b64decode(envelope["payload"]).replace(b"FAILED", b"PASSED")
        path.write_text(json.dumps(envelope | {"payload": base64.b64encode(payload).decode()}))

    return victim.put(failing(victim), edit)


LENIENT = builders.policy(
    runtimes={
        name: one.model_copy(update={"bounds": Bounds(scaled_diff=1.0, top1_agreement=0.5)})
        for name, one in PLAIN.runtimes.items()
    }
)


def by_a_weaker_policy(victim: Victim) -> str:
    """Signed by CI, as a PASS by a policy of its own."""
    made = failing(victim, policy=LENIENT)
    assert made.decision.passed
    return victim.hands.put(victim.hands.laid_out(made, LENIENT), made)


def exchanged_data(folder: Path) -> None:
    path = folder / "weights.data"
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\0\0\0\1")


def decoy(folder: Path) -> None:
    """The right file lies there, and MLflow would load another."""
    onnx_file(folder / "other.onnx", seed=99)
    (folder / "MLmodel").write_text(MLMODEL.format(data="other.onnx"))


def exchanged_array(folder: Path) -> None:
    (first, *_) = sorted((folder / "golden").rglob("*.bin"))
    data = first.read_bytes()
    first.write_bytes(data[:-4] + b"\0\0\0\1")
