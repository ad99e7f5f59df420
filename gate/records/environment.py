"""Where it was measured: machine, libraries, switches. Apart, because workers have their own."""

from __future__ import annotations

from gate.storage.record import Count, Record, later


class Determinism(Record):
    """Switches in force during the measurement, read back after they were set."""

    tf32_matmul: bool
    tf32_cudnn: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    grad: bool
    seed: int
    threads: Count
    """Of PyTorch, and of each session of ONNX Runtime."""
    algorithms: bool = later(False)
    """`torch.use_deterministic_algorithms`."""


class Environment(Record):
    """The machine and the libraries. None: not there."""

    versions: dict[str, str]
    """Distribution name to version: python, torch, torchvision, onnx, onnxruntime, numpy."""
    cpu: str
    cpu_flags: tuple[str, ...] | None = later(None)
    """Instruction sets that change which kernels run, as the kernel reports them: avx2, avx512*,
    amx*, *vnni; on ARM asimd*, sve*, i8mm, bf16. None: unknown, or of before they were recorded."""
    cores: Count | None = later(None)
    """Logical ones that the process may use."""
    os: str | None = later(None)
    """Name and version of the distribution."""
    kernel: str | None = later(None)
    """Its name, release and architecture."""
    cuda: str | None = None
    cudnn: str | None = None
    gpu: str | None = None
    driver: str | None = None
    determinism: Determinism
