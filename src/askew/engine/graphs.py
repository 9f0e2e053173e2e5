"""Moves captured once as CUDA graphs over fixed buffers, and replayed: the host then only starts them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from torch import Tensor

from ..core.local import Progress
from ..kernels.affine_rows import put_active

SMALL_TENSOR = 4096  # numbers; so few are copied together with others
SPARE_BYTES = 2**30  # bytes that rehearsals may leave behind


class GraphCache:
    """Graphs by key, which share a pool of memory: they are replayed on one stream, one after the other."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.device, self.stream = device, stream
        self.cuda = device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def replay(self, key: Hashable, body: Callable[[], None], changed: Callable[[], Sequence[Tensor]]) -> None:
        """Replay what was captured under a key, on the current stream; capture it first if need be.

        `changed` are the tensors that the body changes. Without CUDA the body is simply called.
        """
        if not self.cuda:
            body()
            return
        if key not in self.graphs:
            self.graphs[key] = self._capture(body, changed())
        self.graphs[key].replay()

    def _capture(self, body: Callable[[], None], changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Rehearsals, the first time two, let libraries choose and allocate; then what they changed is put back."""
        before = [t.clone() for t in changed]
        for _ in range(1 if self.graphs else 2):
            body()
        copy_tensors(changed, before)
        torch.cuda.synchronize(self.device)
        if torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device) > SPARE_BYTES:
            torch.cuda.empty_cache()  # what the rehearsals left is of no use to the graph, which has a pool of its own
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        with warnings.catch_warnings(), capture:
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a hook may have nothing to do
            body()
        return graph


@cache
def capture_stream(device: torch.device, replayed_on: int) -> torch.cuda.Stream:
    """The stream on which graphs are captured that are replayed on one stream, by its number.

    Libraries keep working memory for every stream that they are captured on. Graphs that were captured on one stream
    share it, so they must not be replayed at the same time.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def contiguous_copy(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format).copy_(t)


def copy_tensors(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy tensors: large ones each by itself, which uses the whole device, small ones together: fewer launches."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(to, source, strict=True):
        if a is b or not a.numel():
            continue
        if a.numel() > SMALL_TENSOR:
            a.copy_(b)
        else:
            both = kinds.setdefault(a.dtype, ([], []))
            both[0].append(a)
            both[1].append(b)
    for into, values in kinds.values():
        torch._foreach_copy_(into, values)


def progress_tensors(progress: Progress) -> list[Tensor]:
    """The tensors of a progress, in a fixed order."""
    return [progress.theta, progress.loss_sum, *progress.carry.values()]


def overwrite(old: Progress, new: Progress, active: Tensor | None = None) -> None:
    """Put new values in the place of old ones, of active rows only; a hook may have returned an old one under another
    name.
    """
    to, source = progress_tensors(old), [new.theta, new.loss_sum, *(new.carry[n] for n in old.carry)]
    places = {t.data_ptr(): n for n, t in enumerate(to)}
    source = [t if t is to[n] or places.get(t.data_ptr(), n) == n else t.clone() for n, t in enumerate(source)]
    if active is None:
        copy_tensors(to, source)
        return
    for a, b in zip(to, source, strict=True):
        if a is not b:
            put_active(a, b, active)
