"""Networks: forward returns (logits, features), features [B, f] being the input of the last layer.

network.py   the base of all: layers in a row, MOON's projection head, weights from a file
small.py     softmax, mlp, cnn, convnet, lenet, lenet_pmvr, cnn64
resnet.py    resnet18, resnet50
vgg.py       vgg19
lstm.py      charlstm
weights.py   safetensors and torch state dicts
"""

from __future__ import annotations

from ..core.settings import Registry
from .lstm import CharLSTM
from .network import Network
from .resnet import ResNet18, ResNet50
from .small import CNN, CNN64, MLP, ConvNet, LeNet, LeNetPMVR, Softmax
from .vgg import VGG19
from .weights import load_weights

networks: Registry[Network] = Registry(
    "model",
    {
        "charlstm": CharLSTM,
        "cnn": CNN,
        "cnn64": CNN64,
        "convnet": ConvNet,
        "lenet": LeNet,
        "lenet_pmvr": LeNetPMVR,
        "mlp": MLP,
        "resnet18": ResNet18,
        "resnet50": ResNet50,
        "softmax": Softmax,
        "vgg19": VGG19,
    },
)

__all__ = [
    "CNN",
    "CNN64",
    "MLP",
    "VGG19",
    "CharLSTM",
    "ConvNet",
    "LeNet",
    "LeNetPMVR",
    "Network",
    "ResNet18",
    "ResNet50",
    "Softmax",
    "load_weights",
    "networks",
]
