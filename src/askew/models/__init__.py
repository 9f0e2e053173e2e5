"""Networks: forward returns (logits, features)."""

from __future__ import annotations

from ..core.settings import Registry
from .small import CNN, MLP, LeNet, Network, Softmax

networks: Registry[Network] = Registry("model", {"cnn": CNN, "lenet": LeNet, "mlp": MLP, "softmax": Softmax})

__all__ = ["CNN", "MLP", "LeNet", "Network", "Softmax", "networks"]
