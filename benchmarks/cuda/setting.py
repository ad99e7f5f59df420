"""The switches under which a model is measured, and whom they concern.

TF32 holds on both sides. The search for an algorithm of convolution is ONNX Runtime's alone, the
deterministic flag of cuDNN is PyTorch's alone: nobody is measured again for what does not reach
him.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.cuda.device import BASELINE, ON_CUDA, Device, Role
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, CudaProviderPolicy, DeterminismPolicy, Instruments

_ALL: tuple[Role, ...] = (BASELINE, *ON_CUDA)
_BY_ORT: tuple[Role, ...] = ("ort-cuda", "ort-cuda-optimized")
_BY_TORCH: tuple[Role, ...] = ("torch-cuda",)
_NUMBERS_ONLY = Instruments(probes=False, search_inputs=0, graph=False)
"""What a switch can move: samples and stability. Probes and the graph say the same as before."""


@dataclass(frozen=True)
class Setting:
    """One choice of all switches; `default` is that of the built-in policy."""

    name: str
    roles: tuple[Role, ...]
    tf32: bool = False
    cudnn_deterministic: bool = True
    search: Literal["DEFAULT", "HEURISTIC", "EXHAUSTIVE"] = "HEURISTIC"
    algorithms: bool = False
    """Deterministic algorithms alone, of PyTorch and of ONNX Runtime."""
    every_instrument: bool = False
    threads: int | None = None
    """None: as the device has them."""
    switches: dict[str, str] = field(default_factory=dict)
    """What has to stand in the environment before CUDA starts in a process."""

    def environment(self, device: Device) -> dict[str, str]:
        """Of a process that measures under it."""
        threads = self.threads or device.threads
        return self.switches | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})

    def policy(
        self,
        device: Device,
        roles: Sequence[Role],
        *,
        gaps: bool = False,
        proposed: tuple[Bounds, float] | None = None,
    ) -> Policy:
        """The built-in policy with these switches. `gaps`: NaN is an answer of the model;
        `proposed`: bounds of the runtimes on CUDA and of probes, in place of the built-in ones."""
        instruments = Instruments() if self.every_instrument else _NUMBERS_ONLY
        if proposed is not None:
            instruments = instruments.model_copy(update={"probe_noise_ratio": proposed[1]})
        return Policy(
            task="auto",
            nonfinite="same_places" if gaps else "refuse",
            determinism=DeterminismPolicy(
                tf32=self.tf32,
                cudnn_deterministic=self.cudnn_deterministic,
                algorithms=self.algorithms,
                threads=self.threads or device.threads,
            ),
            cuda_provider=CudaProviderPolicy(cudnn_conv_algo_search=self.search),
            instruments=instruments,
            runtimes=device.runtimes(roles, proposed[0] if proposed else None),
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


SETTINGS = {
    one.name: one
    for one in (
        Setting("default", _ALL, every_instrument=True),
        Setting("tf32", ON_CUDA, tf32=True),
        Setting("search-default", _BY_ORT, search="DEFAULT"),
        Setting("search-exhaustive", _BY_ORT, search="EXHAUSTIVE"),
        Setting("cudnn-free", _BY_TORCH, cudnn_deterministic=False),
        Setting(
            "deterministic",
            ON_CUDA,
            algorithms=True,
            switches={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        ),
        Setting("tf32-search-default", _BY_ORT, tf32=True, search="DEFAULT"),
        Setting("tf32-search-exhaustive", _BY_ORT, tf32=True, search="EXHAUSTIVE"),
        Setting("tf32-cudnn-free", _BY_TORCH, tf32=True, cudnn_deterministic=False),
    )
}
"""Of the matrix. Optimizations off and on are two roles."""
ONE_SWITCH = ("tf32", "search-default", "search-exhaustive", "cudnn-free", "deterministic")
TWO_SWITCHES = ("tf32-search-default", "tf32-search-exhaustive", "tf32-cudnn-free")
CORPUS = Setting("corpus", _ALL, every_instrument=True, threads=1)
"""Many small files beside each other, each on one thread."""
