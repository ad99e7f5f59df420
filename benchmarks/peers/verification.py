"""Run `torch.onnx.verification.verify_onnx_program` on a reloaded file.

It returns numbers without a verdict. The bounds are those of `torch.onnx.export(verify=True)`, the
only place where PyTorch compares them with bounds, to issue warnings.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import onnx_ir
import torch
from torch import nn
from torch.onnx.verification import VerificationInfo, verify_onnx_program

from benchmarks.peers.case import CannotJudge, Case, open_session, to_tensors
from gate.export.export_warnings import captured

_MAX_ABS_DIFF, _MAX_REL_DIFF = 5e-3, 1e-1

_PROGRAMS: WeakKeyDictionary[nn.Module, torch.export.ExportedProgram | CannotJudge] = (
    WeakKeyDictionary()
)
"""Cache of exported programs, because many files share one reference."""


def judge(case: Case) -> bool:
    """Verify the first batch. By default the function uses the example of the export."""
    if case.model not in _PROGRAMS:
        try:
            _PROGRAMS[case.model] = export_program(case)
        except CannotJudge as error:
            _PROGRAMS[case.model] = error
    program = _PROGRAMS[case.model]
    if isinstance(program, CannotJudge):
        raise program
    return not any(map(_exceeds_bounds, verify(case, program, batches=1)))


def export_program(case: Case) -> torch.export.ExportedProgram:
    """Export the reference as a program. Raises CannotJudge if torch.export fails."""
    example = to_tensors(next(case.batches()))
    try:
        with captured(), torch.no_grad():
            return torch.export.export(case.model, example)
    except Exception as error:
        message = (str(error).strip().splitlines() or ["no message"])[0]
        raise CannotJudge(f"torch.export: {type(error).__name__}: {message[:120]}") from error


def verify(
    case: Case, program: torch.export.ExportedProgram, *, batches: int
) -> list[VerificationInfo]:
    """Verify the first `batches` batches with all weights in memory, as after an export.

    Runs in a session on the CPU only, because the default session requests CUDA.
    """
    proto = onnx_ir.external_data.load_to_model(onnx_ir.load(case.file))
    onnx_program = torch.onnx.ONNXProgram(proto, program)
    onnx_program.initialize_inference_session(open_session)
    infos = []
    with torch.no_grad():
        for batch, _ in zip(case.batches(), range(batches), strict=False):
            infos += verify_onnx_program(onnx_program, to_tensors(batch))
    return infos


def _exceeds_bounds(info: VerificationInfo) -> bool:
    return info.max_abs_diff >= _MAX_ABS_DIFF or info.max_rel_diff >= _MAX_REL_DIFF
