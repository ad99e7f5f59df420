"""What workers need to measure units of one check: where everything is, and what it must hold."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import nn

from gate.errors import DigestMismatch, PolicyError
from gate.front_door import Reference, case_of
from gate.model.code import code_of
from gate.onnxfile.subject import read_subject
from gate.parity.arrays.labels import open_labels
from gate.parity.arrays.samples import Samples
from gate.parity.case import Case
from gate.parity.workload import Workload
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.scale.own_code import own_digest
from gate.storage.digest import Digest
from gate.storage.record import Count, Record, Sha256


class Assignment(Record):
    """Of one check. A worker opens all of it by itself and verifies the digests."""

    gate_sha256: Sha256
    """Of the gate's own source files."""
    onnx: str
    subject_sha256: Sha256
    factory: str
    checkpoint: str | None
    model_sha256: Sha256
    """Of the weights and buffers that it computes with."""
    code_sha256: Sha256
    """Of the source files that it is made of."""
    inputs: str
    preprocessing: str | None
    """The spec by which pictures become inputs."""
    labels: str | None
    labelled: bool
    """By that file, or by the source itself."""
    batch_size: Count
    policy: Policy
    most_units: Count
    """As `Case.units`."""

    @classmethod
    def of(cls, case: Case, reference: Reference, workload: Workload) -> Assignment:
        """Of what this process opened. Raises PolicyError where another one can't open it."""
        origin = workload.origin
        if not reference.loaded or origin is None or workload.recordings or case.chained:
            raise PolicyError(
                "only one file, of a model of package.module:factory, on samples of a file, "
                "without recordings, can be measured by several processes. Measure with one job."
            )
        if urlsplit(origin.inputs).password:
            raise PolicyError(
                "the address of the samples has a password, which would go to other processes and "
                "into files. Give it by the environment or a profile of the store."
            )
        return cls(
            gate_sha256=own_digest(),
            onnx=str(case.candidate.path),
            subject_sha256=case.candidate.subject.sha256,
            factory=reference.source.factory,
            checkpoint=_text(reference.checkpoint),
            model_sha256=digest_of_model(reference.model),
            code_sha256=_code(reference),
            inputs=origin.inputs,
            preprocessing=_text(origin.preprocessing),
            labels=_text(origin.labels),
            labelled=workload.labels is not None,
            batch_size=workload.batch_size,
            policy=case.policy,
            most_units=case.units,
        )

    def case(self, samples: Samples | None = None) -> Case:
        """Open everything; `samples`: opened already. Raises GateError, DigestMismatch where
        something is another one."""
        _verify("parity-gate itself", own_digest(), self.gate_sha256)
        checkpoint = Path(self.checkpoint) if self.checkpoint else None
        reference = Reference.load(self.factory, checkpoint=checkpoint)
        self.verify(Path(self.onnx), reference)
        spec = PreprocessSpec.of_file(Path(self.preprocessing)) if self.preprocessing else None
        if samples is None:
            samples = Samples.open(self.inputs, preprocessing=spec)
        labels = open_labels(Path(self.labels), samples=len(samples)) if self.labels else None
        workload = Workload(
            samples, labels, batch_size=self.batch_size, units=self.most_units, spec=spec
        )
        case = case_of(Path(self.onnx), reference=reference, workload=workload, policy=self.policy)
        return replace(case, source_labels=self.labelled and labels is None)

    def verify(self, onnx: Path, reference: Reference) -> None:
        """Raise DigestMismatch where the file or the model is another one."""
        _verify(str(onnx), read_subject(onnx).sha256, self.subject_sha256)
        _verify(self.factory, digest_of_model(reference.model), self.model_sha256)
        _verify(f"the code of {self.factory}", _code(reference), self.code_sha256)


def digest_of_model(model: nn.Module) -> Digest:
    """SHA-256 over names, dtypes, shapes and bytes of all parameters and buffers. Raises
    PolicyError where they have no bytes to compare: several processes can't be held together."""
    sha256 = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    try:
        for name, tensor in sorted(tensors.items()):
            value = tensor.detach().cpu().contiguous()
            sha256.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            if value.numel():
                sha256.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    except Exception as error:  # sparse, quantized, on no device
        raise PolicyError(
            f"the tensors of this model can't be compared between processes: {error}. Measure "
            "with one job."
        ) from error
    return Digest(sha256.hexdigest())


def _code(reference: Reference) -> Digest:
    code = reference.source.code or code_of(reference.model, factory=reference.source.factory)
    return code.digest()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _verify(what: str, opened: Digest, expected: Digest) -> None:
    if opened != expected:
        raise DigestMismatch(
            f"{what} is {opened} for a worker, {expected} was planned. Give every worker the same "
            "files and code."
        )
