"""The settings of `[engine]`."""

from __future__ import annotations

import torch

from ..core.settings import Settings, setting
from ..errors import EngineError

ROW_ENGINES = ("stacked", "vmapped")  # engines that train many networks as rows


class EngineSettings(Settings):
    """Where and how a run is computed."""

    title = "engine"
    name: str = setting(
        "engine; auto chooses and says why",
        default="auto",
        choices=("auto", "sequential", "slots", "stacked", "vmapped"),
    )
    device: str = setting("auto, cpu, cuda or cuda:N", default="auto")
    workers: int = setting(
        "processes on this machine that share the work, with the same results; 0: one, and on a CPU more once long "
        "rounds make it worth it",
        default=0,
        least=0,
        most=128,
    )
    dtype: str = setting(
        "precision; tf32: float32 with products of TF32 on CUDA; bf16: float32 with forward passes in bfloat16",
        default="float32",
        choices=("float32", "float64", "tf32", "bf16"),
    )
    compile: bool = setting(
        "compile the network's forward and backward pass (torch.compile); slow to start", default=False
    )
    deterministic: bool = setting(
        "the same bits in every run on one machine with the same versions; nothing is chosen by timing, and on CUDA "
        "only deterministic functions are used",
        default=False,
    )

    @property
    def storage(self) -> torch.dtype:
        """The type of weights and inputs."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def check(self) -> None:
        if self.compile and self.name in ROW_ENGINES:
            raise EngineError(
                'engine: compile = true is for engine.name = "sequential" or "slots"; leave one of the two out.'
            )
        if self.compile and self.deterministic:
            raise EngineError(
                "engine: compile = true chooses kernels by timing, so deterministic = true cannot hold; "
                "leave one of the two out."
            )
        if self.dtype == "bf16" and self.name == "vmapped":
            raise EngineError(
                'engine: dtype = "bf16" is for engine.name = "sequential", "slots" or "stacked"; '
                "leave one of the two out."
            )
