"""How papers, their own methods and the cases of their experiments are called on pages and pictures."""

from __future__ import annotations

import re

from .papers import Experiment

# Papers in the order of the ledger, by folder, with their titles.
TITLES = {"feddpc": "FedDPC", "feddc": "FedDC", "mldl24": "MLDL24", "fedpmvr": "FedPMVR", "fedpdc": "FedPDC"}
# The methods that a paper proposes or compares with FedAvg, where they are not called like the paper.
OWN_METHODS = {"mldl24": ("Loss-biased", "MGDA")}
DATA_PATTERNS = (r"cifar(\d+)", "mnist", "fashion_mnist", "tiny_imagenet", r"synthetic-(\d)-(\d)")
CASE_PARTS = re.compile(r"synthetic-\d-\d|gamma-[\d.]+|by-role|[^-]+")  # of the name of a case
CASE_WORDS = {  # how they read, by their pattern
    r"cifar(\d+)": r"CIFAR-\1",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "tiny_imagenet": "Tiny ImageNet",
    "cnn": "CNN",
    "lenet": "LeNet",
    r"vgg(\d+)": r"VGG\1",
    r"resnet(\d+)": r"ResNet\1",
    r"synthetic-(\d)-(\d)": r"Synthetic (\1, \2)",
    r"gamma-(.+)": r"γ \1",
    r"(0\.\d+)": r"Dirichlet \1",
    "15": "15%",
    "by-role": "by role",
    "Nc1": "1 label",
    r"Nc(\d+)": r"\1 labels",
    r"J(\d+)": r"J \1",
}


def own_methods(paper: str) -> tuple[str, ...]:
    """The methods that a paper proposes, by its folder."""
    return OWN_METHODS.get(paper, (TITLES.get(paper, paper),))


def case_title(name: str) -> str:
    """A case in words: "cifar10-cnn-0.1" is "CIFAR-10, CNN, Dirichlet 0.1"."""
    parts = CASE_PARTS.findall(name)
    for pattern, words in CASE_WORDS.items():
        parts = [re.sub(pattern, words, part) if re.fullmatch(pattern, part) else part for part in parts]
    return ", ".join(parts)


def data_title(e: Experiment, case: str) -> str:
    """A case of an experiment in words, with its data where its name does not say them."""
    title, data = case_title(case), case_title(e.base.get("data", {}).get("name", "")).capitalize()
    named = any(re.match(pattern, case) for pattern in DATA_PATTERNS)
    return title if named or not data else f"{data.replace('Cifar', 'CIFAR')}, {title}"
