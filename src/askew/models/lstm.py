"""A recurrent network that reads characters and predicts the next one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from ..core.settings import setting
from ..errors import ModelError
from .network import Network, make_chain


class RequireTokens(nn.Module):
    """Lets whole numbers pass."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            raise ModelError(
                f"charlstm reads tokens, whole numbers from 0, and these inputs are {x.dtype}; use a text dataset, or "
                "mlp."
            )
        return x


class LastOutputLSTM(nn.LSTM):
    """An LSTM that gives its last layer's output at the last position."""

    reads_last = True  # so that a kernel may take it

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        try:
            output, _ = self.forward_on_gpu(x) if x.is_cuda else super().forward(x)
        except RuntimeError as e:
            if "Batching rule" not in str(e):
                raise
            raise ModelError('charlstm trains one client at a time; set engine.name = "sequential".') from None
        return output[:, -1]

    def forward_on_gpu(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """cuDNN needs the weights in an order of its own, which a flat w is not, and copies them at each call; no need
        to warn.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            return super().forward(x)


class CharLSTM(Network):
    """An embedding of tokens [B, L], LSTM layers, and a linear layer on the last position; the vocabulary is the
    classes.
    """

    idea: ClassVar[str] = "character LSTM: predicts the next token of a text; 819,920 parameters with 80 tokens"
    embedding: int = setting("length of a token's vector", default=8, least=1)
    hidden: int = setting("units of each LSTM layer", default=256, least=1)
    layers: int = setting("LSTM layers", default=2, least=1)

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        if len(shape) != 1 or not shape[0] or not classes:
            raise ModelError(
                f"charlstm needs inputs [length] of tokens and one class for each token, got shape {list(shape)} and "
                f"{classes} classes; "
                "use a text dataset, or mlp, which takes any shape."
            )
        return make_chain(self.layer_sequence(classes))

    def layer_sequence(self, vocabulary: int) -> Iterator[tuple[str, nn.Module]]:
        yield "tokens", RequireTokens()
        yield "embedding", nn.Embedding(vocabulary, self.embedding)
        yield "lstm", LastOutputLSTM(self.embedding, self.hidden, self.layers, batch_first=True)
        yield "out", nn.Linear(self.hidden, vocabulary)
