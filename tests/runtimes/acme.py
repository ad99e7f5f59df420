"""Plug-in runtimes as in docs/runtimes.md: a correct one, and one for each possible fault."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from gate.runtimes import Promises, Proof, Runtime, Session


class Running(Session):
    def __init__(self, path):
        import onnxruntime

        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(self, batch):
        return self.session.run(None, dict(batch))

    def proof(self):
        return Proof(providers_active=("ACME",), precision="float32")


class Settings(BaseModel, extra="forbid"):
    fast: bool = False


class Acme(Runtime):
    promises = Promises(provider="ACME")
    options = Settings

    def versions(self):
        return {"acme": "1.2"}

    session = Running

    def open(self, file, *, options, conditions, example):
        return self.session(str(file.path))


class Needed(BaseModel, extra="forbid"):
    board: str


class Needs(Acme):
    options = Needed


class Absent(Acme):
    def absent_reason(self, options):
        return "no ACME chip on this machine"


class RaisesInOpen(Acme):
    def open(self, file, **_):
        print("the chip is on fire")
        raise RuntimeError("cannot open")


class RaisesInLook(Acme):
    def absent_reason(self, options):
        raise OSError("a driver is broken")


class LacksLibrary(Acme):
    def open(self, file, **_):
        raise ImportError("libacme.so.1: cannot open shared object file")


class Exits(Acme):
    def open(self, file, **_):
        sys.exit(0)


class Dies(Acme):
    def open(self, file, **_):
        print("illegal instruction", flush=True)
        os._exit(0)


class Hangs(Acme):
    limit_s = 0.5

    def open(self, file, **_):
        time.sleep(3600)


class _Few(Running):
    def run(self, batch):
        return super().run(batch)[:-1]


class TooFew(Acme):
    session = _Few


class _Words(Running):
    def run(self, batch):
        return ["no array"] * len(self.session.get_outputs())


class Words(Acme):
    session = _Words


class _Zeros(Running):
    def run(self, batch):
        return [output * 0 for output in super().run(batch)]


class AnotherModel(Acme):
    session = _Zeros


class _Unproven(Running):
    def proof(self):
        return Proof(providers_active=("CPU",), precision="float32")


class Unproven(Acme):
    session = _Unproven


class _Rounded(Running):
    def proof(self):
        return Proof(providers_active=("ACME",), precision="bfloat16")


class Rounded(Acme):
    session = _Rounded


class _Stored(Running):
    live = False


class Stored(Acme):
    session = _Stored


class _AsksItself(Running):
    def has_probe(self, batch):
        return False

    def run_probe(self, batch):
        raise RuntimeError("no probes")


class AsksItself(Acme):
    session = _AsksItself


class _NoProof(Running):
    def proof(self):
        raise RuntimeError("no counters")


class NoProof(Acme):
    session = _NoProof


class _BadProof(Running):
    def proof(self):
        return Proof(providers_active=(1,), nodes_per_provider={"ACME": -1})


class BadProof(Acme):
    session = _BadProof


class _Closing(Running):
    def __init__(self, path):
        super().__init__(path)
        self.note = Path(f"{path}.closed")

    def close(self):
        self.note.touch()


class Closing(Acme):
    session = _Closing


class Nothing:
    """A class that is not a runtime."""


def install(folder: Path, points: dict[str, str], *, name: str = "acme-parity") -> None:
    """Write the metadata of a distribution, as `pip install --target` does.

    points: path of the class for each runtime name.
    """
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = "".join(f"{point} = {location}\n" for point, location in points.items())
    (info / "entry_points.txt").write_text(f"[parity_gate.runtimes]\n{lines}")


class _Saying(Running):
    """A session with correct outputs that reports this value as its time and memory."""

    def __init__(self, path, reported, **proof):
        super().__init__(path)
        self.seconds = self.open_seconds = reported
        self.proven = {"memory_bytes": reported, "peak_bytes": reported, **proof}

    def proof(self):
        return replace(super().proof(), **self.proven)


class Boasts(Acme):
    def open(self, file, **_):
        return _Saying(str(file.path), np.int64(15))


class Babbles(Acme):
    def open(self, file, **_):
        return _Saying(str(file.path), "little")


class ElsewhereAgain(Acme):
    def open(self, file, **_):
        return _Saying(str(file.path), None, own_process=True)
