"""Space: a torch module seen as one point w in R^P, with its buffers beside it in R^Q."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .types import Part

WRAPPED = "module."  # begins the names of a user's network whose forward gives an output alone
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


class Space:
    """The names, shapes and places of a module's trainable parameters and float buffers.

    Buffers (batch-norm statistics) are not coordinates of w: an algorithm's arithmetic could push a variance below
    zero. Integer buffers and frozen parameters belong to the network and stay as they are.

    `channels_last`: coordinates of convolutions are ordered channels-last, so that a network bound to w has the memory
    format that matrix units want. It is another order of the same coordinates; methods do not depend on it.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self.dtype, self.device, self.channels_last = dtype, torch.device(device), channels_last
        for name, layer in module.named_modules():
            if isinstance(layer, BATCH_NORMS) and layer.track_running_stats:
                if layer.momentum is None:
                    raise ModelError(
                        f"{name}: batch norm with momentum=None keeps a step count, which cannot be averaged; give it "
                        "0.1."
                    )
                layer.num_batches_tracked = (
                    None  # counted in place, which no function transform allows; unused otherwise
                )
        self.modules = {name: type(layer) for name, layer in module.named_modules()}
        params = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
        floats = {n: b.detach() for n, b in module.named_buffers() if b.is_floating_point()}
        if not params:
            raise ModelError("the network has no trainable parameter; there is nothing to learn. Check requires_grad.")
        self.shapes = {n: p.shape for n, p in params.items()}
        self.sizes = [p.numel() for p in params.values()]
        self.buffer_shapes = {n: b.shape for n, b in floats.items()}
        self.buffer_sizes = [b.numel() for b in floats.values()]
        self.P, self.Q = sum(self.sizes), sum(self.buffer_sizes)
        self.start, self.buffers = self._flat(params.values()), self._flat(floats.values())
        if not bool(torch.isfinite(self.start).all()):
            raise ModelError(
                "the network starts with a weight that is not finite; check its initialisation or the given weights."
            )

    def _flat(self, tensors: Iterable[Tensor]) -> Tensor:
        flat = [self.flatten_parameter(t).to(self.device, self.dtype) for t in tensors]
        return torch.cat(flat) if flat else torch.zeros(0, dtype=self.dtype, device=self.device)

    def flatten_parameter(self, t: Tensor) -> Tensor:
        """One parameter's coordinates in their order; as a view where it can be one."""
        return (t.permute(0, 2, 3, 1) if self.channels_last and t.dim() == 4 else t).reshape(-1)

    def unflatten_parameter(self, row: Tensor, shape: torch.Size) -> Tensor:
        """One parameter from its coordinates, as a view."""
        if not self.channels_last or len(shape) != 4:
            return row.view(shape)
        out, inner, height, width = shape
        return row.view(out, height, width, inner).permute(0, 3, 1, 2)

    def zeros(self) -> Tensor:
        """The origin of R^P."""
        return torch.zeros(self.P, dtype=self.dtype, device=self.device)

    def zeros_float64(self) -> Tensor:
        """The origin in float64: for running means over all N clients, which are updated for ever."""
        return torch.zeros(self.P, dtype=torch.float64, device=self.device)

    def scalar(self, value: float = 0.0) -> Tensor:
        """A number kept as state; 0-d server state is logged each round."""
        return torch.tensor(value, dtype=self.dtype, device=self.device)

    def split(self, w: Tensor) -> dict[str, Tensor]:
        """w as the module's parameters: one split, whose backward is one cat."""
        return {
            n: self.unflatten_parameter(t, s)
            for (n, s), t in zip(self.shapes.items(), torch.split(w, self.sizes), strict=True)
        }

    def split_buffers(self, b: Tensor) -> dict[str, Tensor]:
        """b as the module's float buffers."""
        return {
            n: t.view(s)
            for (n, s), t in zip(self.buffer_shapes.items(), torch.split(b, self.buffer_sizes), strict=True)
        }

    # parts ------------------------------------------------------------------------------------------------------

    def _part(self, wanted: Callable[[str], bool]) -> Part:
        return self._tensors(lambda name: wanted(name.rpartition(".")[0]))

    def _tensors(self, wanted: Callable[[str], bool]) -> Part:
        def indices_of(names: Iterable[str], sizes: list[int]) -> Tensor:
            picked, at = [], 0
            for name, size in zip(names, sizes, strict=True):
                if wanted(name):
                    picked.append(torch.arange(at, at + size))
                at += size
            return torch.cat(picked).to(self.device) if picked else torch.zeros(0, dtype=torch.long, device=self.device)

        return Part(indices_of(self.shapes, self.sizes), indices_of(self.buffer_shapes, self.buffer_sizes))

    def empty_part(self) -> Part:
        return self._part(lambda _: False)

    def whole_part(self) -> Part:
        return self._part(lambda _: True)

    def layers_of_type(self, *types: type[nn.Module]) -> Part:
        """Parameters and buffers of all layers of these types; by type, never by the letters of a name."""
        return self._part(lambda layer: issubclass(self.modules[layer], types))

    def named_layers(self, *names: str) -> Part:
        """Parameters and buffers of the named layers and of all below them."""
        known = {n.removeprefix(WRAPPED): n for n in self.modules} | {n: n for n in self.modules}
        for name in names:
            if name not in known:
                layers = dict.fromkeys(n.removeprefix(WRAPPED) for n in self.modules if n + "." != WRAPPED)
                raise ModelError(f"the network has no layer {name!r}; it has {', '.join(filter(None, layers))}.")
        wanted = [known[name] for name in names]
        return self._part(lambda layer: any(layer == n or layer.startswith(n + ".") for n in wanted))

    def last_layers(self, count: int) -> Part:
        """Parameters and buffers of the last `count` layers that have parameters."""
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in self.shapes))
        return self._part(lambda layer: layer in owners[len(owners) - count :]) if count else self.empty_part()

    def last_tensors(self, count: int) -> Part:
        """The last `count` parameter tensors."""
        names = list(self.shapes)
        return self._tensors(lambda name: name in names[len(names) - count :])
