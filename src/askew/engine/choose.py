"""Which engine a run gets, and why. A rule, not a stopwatch: engines agree only to rounding, and the same configuration
must give the same numbers on a busy machine as on an idle one."""

from __future__ import annotations

import torch
from torch import nn

from ..core.settings import Settings, setting
from ..core.space import BATCH_NORMS, Space
from ..errors import EngineError

SMALL = 100_000  # parameters; above, one client's step keeps a core busy by itself
WIDE = 8.0  # clients at work side by side, on average; below, a vmapped step costs more than the steps it replaces
DENSE = (nn.Linear, nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.Flatten, nn.GroupNorm, nn.LayerNorm, nn.Identity, nn.Sequential)
RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


class EngineSettings(Settings):
    """Where and how a run is computed."""

    title = "engine"
    name: str = setting("engine; auto chooses and says why", default="auto", choices=("auto", "sequential", "slots", "vmapped"))
    device: str = setting("auto, cpu, cuda or cuda:N", default="auto")
    workers: int = setting("processes on this machine that share the work; the results stay the same", default=1, least=1, most=128)
    dtype: str = setting(
        "precision; tf32: float32 with products of TF32 on CUDA; bf16: float32 with forward passes in bfloat16",
        default="float32",
        choices=("float32", "float64", "tf32", "bf16"),
    )
    compile: bool = setting("compile the network's forward and backward pass (torch.compile); slow to start", default=False)

    @property
    def storage(self) -> torch.dtype:
        """The type of weights and inputs."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def check(self) -> None:
        if self.compile and self.name == "vmapped":
            raise EngineError('engine: compile = true is for engine.name = "sequential" or "slots"; leave one of the two out.')
        if self.dtype == "bf16" and self.name == "vmapped":
            raise EngineError('engine: dtype = "bf16" is for engine.name = "sequential" or "slots"; leave one of the two out.')


def stochastic(module: nn.Module) -> bool:
    """Does the network draw random numbers while training?"""
    return any(isinstance(layer, RANDOM) and getattr(layer, "p", 1) for layer in module.modules())


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(layer, BATCH_NORMS) for layer in module.modules())


def choose(name: str, module: nn.Module, space: Space, width: float, plain: bool = False) -> tuple[str, str]:
    """The engine's name and the reason for it; `width` is a cohort's work divided by its longest client's."""
    if name in ("vmapped", "slots") and stochastic(module):
        raise EngineError(f'engine: "{name}" cannot run a network with dropout reproducibly; use engine.name = "sequential".')
    if name != "auto":
        return name, "as configured"
    if stochastic(module):
        return "sequential", "the network draws random numbers while training"
    if space.device.type == "cuda":
        return "slots", "a GPU is kept busy by many clients at a time"
    foreign = [type(m).__name__ for m in module.modules() if not isinstance(m, DENSE) and not type(m).__module__.startswith("askew.")]
    if foreign:
        return "sequential", f"{foreign[0]} is faster, or only known to work, one client at a time"
    if plain:
        return "sequential", "compiled and bfloat16 networks are trained one client at a time"
    if space.P > SMALL:
        return "sequential", f"with {space.P:,} parameters one client's step keeps the machine busy"
    if width < WIDE:
        return "sequential", f"only about {width:.1f} clients would be at work side by side"
    return "vmapped", f"a small dense network ({space.P:,} parameters), about {width:.0f} clients at work side by side"
