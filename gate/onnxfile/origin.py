"""Which exact file a quantized one was made of, as its metadata says.

Apart, so that who quantizes and who promotes know one key.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from gate.errors import OnnxFileError

QUANTIZED_FROM = "parity_gate.quantized_from"
"""Key in the file's metadata: digest of the exact file."""


def quantized_from(path: Path) -> str | None:
    """The digest of the exact file, `sha256:…`; None where the file names none.

    Raises OnnxFileError for a file that is no ONNX model.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's DecodeError, OSError
        raise OnnxFileError(f"{path} can't be read as an ONNX model: {error}.") from error
    found = [entry.value for entry in model.metadata_props if entry.key == QUANTIZED_FROM]
    return found[0] if len(found) == 1 else None
