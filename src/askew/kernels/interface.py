"""Kernels: what engines, networks and tasks ask. A question answered by None is left to the plain code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.task import Task
from .cpu import compiler
from .cpu.dense import SOURCE
from .cuda import available, group_norm, nvrtc
from .cuda import cross_entropy as cuda_cross_entropy
from .layers import run_layers
from .steps import StepKernels


class Kernels:
    """The kernels of one engine on one device, and the names of those that it used."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.used: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernels:
        """Copies of a network share its kernels."""
        return self

    def steps(self, task: Task) -> StepKernels:
        """What takes local steps of a task's network."""
        return StepKernels(task, self.used)

    def run_layers(self, x: Tensor, layers: Sequence[nn.Module], pooled: bool = False) -> Tensor:
        """The output of a network's layers in a row."""
        return run_layers(x, layers, self.used, pooled)

    def norm_relu(self, x: Tensor, norm: nn.Module, shortcut: Tensor | None) -> Tensor | None:
        """relu(norm(x) + shortcut)."""
        if not group_norm.can_run(x, norm):
            return None
        self.used.add("Triton (group norm)")
        return group_norm.norm_relu(x, norm, shortcut=shortcut)

    def cross_entropy(self, output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor | None:
        """The mean cross-entropy of a batch."""
        if not cuda_cross_entropy.can_run(output, y):
            return None
        self.used.add("Triton (cross-entropy)")
        return cuda_cross_entropy.cross_entropy(output, y, weight)

    def identity(self) -> str:
        """What computes, whatever a run uses of it: two that are equal give the same bits."""
        if self.device.type == "cuda":
            own = "CUDA C and Triton kernels" if nvrtc.can_compile() else "Triton kernels"
            return own if available() else "torch's kernels"
        library = compiler.library(SOURCE, self.dtype)
        # the end of a compiled file's name is a hash of its content
        return f"C kernels {Path(library._name).stem[-8:]}" if library else "torch's kernels"

    def summary(self) -> str:
        """The kernels that were used, for the record; where none can be had, torch's, and why."""
        if self.device.type == "cuda":
            missing = "" if available() else "no Triton"
        else:
            missing = "" if compiler.library(SOURCE, self.dtype) else compiler.why_not(SOURCE)
        used = {name for name in self.used if not name.startswith("torch")}
        return ", ".join(sorted(used)) or (f"torch ({missing})" if missing else "torch")
