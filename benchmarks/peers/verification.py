"""`torch.onnx.verification.verify_onnx_program` on a reloaded file.

It returns numbers without a verdict; the bounds are those of `torch.onnx.export(verify=True)`,
the only place where torch judges them (there they become warnings).
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import onnx_ir
import torch
from torch import nn
from torch.onnx.verification import VerificationInfo, verify_onnx_program

from benchmarks.peers.case import CannotJudge, Case, session, tensors
from gate.export.export_warnings import captured

_MAX_ABS_DIFF, _MAX_REL_DIFF = 5e-3, 1e-1

_PROGRAMS: WeakKeyDictionary[nn.Module, torch.export.ExportedProgram | CannotJudge] = (
    WeakKeyDictionary()
)
"""What `judge` exported already: many files have one reference."""


def judge(case: Case) -> bool:
    """The first batch, as by default, where it takes the example of the export."""
    if case.model not in _PROGRAMS:
        try:
            _PROGRAMS[case.model] = exported(case)
        except CannotJudge as error:
            _PROGRAMS[case.model] = error
    program = _PROGRAMS[case.model]
    if isinstance(program, CannotJudge):
        raise program
    return not any(map(_worth_a_warning, verify(case, program, batches=1)))


def exported(case: Case) -> torch.export.ExportedProgram:
    """The reference as it needs it. Raises CannotJudge where torch.export can't take the model."""
    example = tensors(next(case.batches()))
    try:
        with captured(), torch.no_grad():
            return torch.export.export(case.model, example)
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        raise CannotJudge(f"torch.export: {type(error).__name__}: {first[:120]}") from error


def verify(
    case: Case, program: torch.export.ExportedProgram, *, batches: int
) -> list[VerificationInfo]:
    """Of the first `batches` batches, in a session on the CPU alone (its own asks for CUDA), with
    all weights in memory, as after an export."""
    loaded = onnx_ir.external_data.load_to_model(onnx_ir.load(case.file))
    verified = torch.onnx.ONNXProgram(loaded, program)
    verified.initialize_inference_session(session)
    infos = []
    with torch.no_grad():
        for batch, _ in zip(case.batches(), range(batches), strict=False):
            infos += verify_onnx_program(verified, tensors(batch))
    return infos


def _worth_a_warning(info: VerificationInfo) -> bool:
    return info.max_abs_diff >= _MAX_ABS_DIFF or info.max_rel_diff >= _MAX_REL_DIFF
