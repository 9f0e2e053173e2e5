"""Weights from a file: safetensors, or a torch state dict read without running any code in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..core.files import is_file, is_readable_file, read_tensors
from ..errors import ModelError

HEAD = ("head1", "head2")  # the linear layers of a projection head
SHOWN = 3


def load_weights(module: nn.Module, path: str, new_head: bool) -> None:
    """Give a module the weights in a file; all must fit.

    `new_head` leaves the last layer and a projection head as they are where the file has none of their shape. Whole
    numbers (batch norm's step counts) are no weights: they may be missing or left over, and stay as they are.
    """
    given, wanted = tensors_of_file(Path(path)), float_tensors(module.state_dict())
    if not any(n in wanted for n in given):
        given = {n.removeprefix("module."): t for n, t in given.items()}  # as DataParallel saves it
    absent = [n for n in wanted if n not in given]
    other = [n for n in wanted if n in given and given[n].shape != wanted[n].shape]
    extra = [n for n in given if n not in wanted]
    last = [layer_of(n) for n, _ in module.named_parameters()][-1:]
    drawn = {layer_of(n) for n in (*absent, *other)} & {*last, *HEAD}
    if new_head:
        absent, other = ([n for n in names if layer_of(n) not in drawn] for names in (absent, other))
    if absent or extra or other:
        shapes = [f"{n}: {list(given[n].shape)} in the file, {list(wanted[n].shape)} here" for n in other]
        kinds = {"missing": absent, "unexpected": extra, "of another shape": shapes}
        differences = "; ".join(f"{len(names)} {kind} ({first_names(names)})" for kind, names in kinds.items() if names)
        only_head = drawn and not extra and all(layer_of(n) in drawn for n in (*absent, *other))
        hint = (
            f"set model.new_head = true to leave {', '.join(sorted(drawn))} as drawn"
            if only_head
            else "take a file of this network"
        )
        raise ModelError(f"the weights in {path} do not fit the network: {differences}; {hint}.")
    with torch.no_grad():
        for name, tensor in wanted.items():
            if layer_of(name) not in drawn:
                tensor.copy_(given[name])


def tensors_of_file(path: Path) -> dict[str, Tensor]:
    """The float tensors of a file by their names, out of what wrappers there are."""
    if not is_file(path):
        raise ModelError(
            f"there is no weights file {str(path)!r}; name a .safetensors file or a torch state dict in model.weights."
        )
    if not is_readable_file(path):
        raise ModelError(f"the weights file {path} is far too large; name the file of a network in model.weights.")
    found = read_file(path)
    for wrapper in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping) or not found:
        raise ModelError(f"the weights file {path} holds no tensors by name; save the network's state_dict().")
    odd = [
        str(n)
        for n, t in found.items()
        if not isinstance(n, str) or not isinstance(t, Tensor) or t.layout is not torch.strided
    ]
    if odd:
        raise ModelError(
            f"the weights file {path} holds {len(odd)} values that are no tensors ({first_names(odd)}); "
            "save the state_dict() alone."
        )
    return float_tensors(found)


def read_file(path: Path) -> object:
    """What a file holds. Anything may go wrong inside a damaged one, so anything is caught."""
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path)[0]
        return torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise ModelError(
            f"the weights file {path} may not be read; change its permissions, or name another file."
        ) from None
    except Exception:
        raise ModelError(
            f"the weights file {path} is damaged, of another format, or holds Python objects, which could run code and "
            "are not opened; "
            "save the state_dict() with torch.save, or as safetensors under a name that ends in .safetensors."
        ) from None


def float_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if t.is_floating_point()}


def layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def first_names(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
