"""Weights from a file: what is loaded, what is refused, and that nothing in a file is run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import askew
from askew.core.space import Space
from askew.engine.evaluate import accuracy_by_rarity, client_spread, rarest_classes
from askew.errors import ModelError
from askew.experiment.build import build
from askew.experiment.config import Config
from askew.experiment.run_evaluation import evaluate_models
from askew.models import CNN, MLP, Network, ResNet18, ResNet50, load_weights

SHAPE = (1, 8, 8)


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.mark,)


def other_network(classes: int = 10, **settings: object) -> nn.Module:
    """A network whose weights and statistics are not those that any other starts with."""
    module = CNN(norm="batch", **settings).build_module(SHAPE, classes)
    module(torch.rand(4, *SHAPE))
    return module


def load_network(path: Path, classes: int = 10, **settings: object) -> nn.Module:
    """A network that starts from the weights in a file."""
    return CNN(norm="batch", weights=str(path), **settings).build_module(SHAPE, classes)


def same_outputs(a: nn.Module, b: nn.Module) -> bool:
    """Do two networks give the same outputs for random images?"""
    x = torch.rand(4, *SHAPE)
    return torch.equal(a.eval()(x)[0], b.eval()(x)[0])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedexp", {"evaluate_average_of_last_two": True}),
        ("fedawe", {"evaluate_mean": True}),
        ("fedbn", {"eval": "server_mean"}),
        ("feddyn", {}),
    ],
)
def test_a_stored_model_has_the_reported_accuracies(method: str, settings: dict[str, object], tmp_path: Path) -> None:
    """On the test set, on its rarest classes, and on the clients' own samples."""
    common: dict[str, Any] = {"data": "digits", "clients": 10, "cohort": 4, "lr": 0.2, "device": "cpu"}
    common["evaluation"] = {"spread": True, "rare": True}
    model = {"name": "cnn", "norm": "batch"} if method == "fedbn" else {"name": "mlp"}
    run = askew.run(method, model=model, rounds=3, out=tmp_path, **settings, **common)
    assert run.folder
    network = model | {"weights": str(run.folder / "model.safetensors")}
    tables = {"data": {"name": "digits"}, "model": network, "engine": {"device": "cpu"}, "partition": {"clients": 10}}
    built = build(Config.build(tables))
    scores, last = evaluate_models(built)["global"].tolist(), run.rounds[-1]
    assert scores == [run.final_accuracy, run.last("loss")]
    fed, model_of_all = built.fed, (built.server.w, built.server.buffers)
    of_clients = client_spread(built.task, *model_of_all, fed, built.server.private, None)
    assert of_clients == {name: last[name] for name in of_clients}
    if "accuracy_rare" in last:  # not where parts are private
        assert accuracy_by_rarity(built.task, *model_of_all, fed)["accuracy_rare"] == last["accuracy_rare"]
        share = float(torch.isin(fed.test.y, torch.from_numpy(rarest_classes(fed))).double().mean())
        both = share * last["accuracy_rare"] + (1 - share) * last["accuracy_common"]
        assert both == pytest.approx(last["accuracy"], abs=1e-12)


@pytest.mark.parametrize("file", ["w.safetensors", "w.pt", "w.pth", "weights"])
def test_a_network_starts_from_a_file(file: str, tmp_path: Path) -> None:
    module, path = other_network(), tmp_path / file
    save_file(module.state_dict(), path) if path.suffix == ".safetensors" else torch.save(module.state_dict(), path)
    assert same_outputs(load_network(path), module)
    assert not same_outputs(CNN(norm="batch").build_module(SHAPE, 10), module)
    assert CNN(weights=str(path)).reads() == (path,)


WRAPPERS: list[Callable[[dict[str, Tensor]], object]] = [
    lambda state: {"state_dict": state, "epoch": 3},
    lambda state: {"model": state, "optimizer": {"lr": 0.1}},
    lambda state: {f"module.{n}": t for n, t in state.items()},
    lambda state: {"state_dict": {f"module.{n}": t for n, t in state.items()}},
    lambda state: {n: t for n, t in state.items() if "tracked" not in n},  # as a run stores them
    lambda state: {n: t.double() if t.is_floating_point() else t for n, t in state.items()},
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("zip", [True, False])
def test_what_others_write_is_understood(
    wrap: Callable[[dict[str, Tensor]], object], zip: bool, tmp_path: Path
) -> None:
    module, path = other_network(), tmp_path / "w.pt"
    torch.save(wrap(module.state_dict()), path, _use_new_zipfile_serialization=zip)
    assert same_outputs(load_network(path), module)


def test_a_network_of_that_name_keeps_its_prefix(tmp_path: Path) -> None:
    module = nn.ModuleDict({"module": nn.Linear(2, 2)})
    torch.save({n: torch.ones_like(t) for n, t in module.state_dict().items()}, tmp_path / "w.pt")
    load_weights(module, str(tmp_path / "w.pt"), False)
    assert all(bool((p == 1).all()) for p in module.parameters())


def test_a_run_without_step_counts_is_loaded_into_a_space(tmp_path: Path) -> None:
    module = other_network()
    save_file({n: t for n, t in module.state_dict().items() if t.is_floating_point()}, tmp_path / "model.safetensors")
    space, again = Space(module), Space(load_network(tmp_path / "model.safetensors"))
    assert torch.equal(space.start, again.start) and torch.equal(space.buffers, again.buffers)


def save_changed(path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Save a network's weights after a change."""
    state = dict(other_network().state_dict())
    change(state)
    torch.save(state, path)
    return path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.pop("conv1.bias"), r"1 missing \(conv1.bias\); take a file of this network\.$"),
        (lambda s: s.update(extra=torch.ones(1)), r"network: 1 unexpected \(extra\); take"),
        (
            lambda s: s.update({"fc1.bias": torch.ones(5)}),
            r"1 of another shape \(fc1.bias: \[5\] in the file, \[64\] here\); take",
        ),
        (lambda s: s.update({"norm1.running_var": torch.ones(3)}), r"1 of another shape \(norm1.running_var: \[3\]"),
        (
            lambda s: [s.update({n + "x": s.pop(n)}) for n in list(s) if s[n].is_floating_point()],
            r"16 missing \(conv1.weight, conv1.bias, norm1.weight, …\); "
            r"16 unexpected \(conv1.weightx, conv1.biasx, norm1.weightx, …\);",
        ),
        (
            lambda s: s.update({"out.bias": torch.ones(7)}),
            r"\(out.bias: \[7\] .*\); set model.new_head = true to leave out as drawn\.$",
        ),
    ],
)
def test_weights_of_another_network_are_refused(
    change: Callable[[dict[str, Tensor]], object], sentence: str, tmp_path: Path
) -> None:
    path = save_changed(tmp_path / "w.pt", change)
    with pytest.raises(ModelError, match=sentence) as e:
        load_network(path)
    assert str(e.value).startswith(f"the weights in {path} do not fit the network: ") and "\n" not in str(e.value)


def test_a_new_head_takes_another_number_of_classes(tmp_path: Path) -> None:
    module, path = other_network(10), tmp_path / "w.pt"
    torch.save(module.state_dict(), path)
    with pytest.raises(
        ModelError, match=r"2 of another shape \(out.weight: .*model.new_head = true to leave out as drawn"
    ):
        load_network(path, classes=3)
    torch.manual_seed(1)
    drawn = CNN(norm="batch").build_module(SHAPE, 3)
    torch.manual_seed(1)
    fresh = load_network(path, classes=3, new_head=True)
    for name, tensor in fresh.state_dict().items():
        if not name.endswith("tracked"):
            assert torch.equal(
                tensor, drawn.state_dict()[name] if name.startswith("out.") else module.state_dict()[name]
            ), name
    assert same_outputs(load_network(path, new_head=True), module)  # where shapes agree, the last layer is taken too


def test_a_new_head_is_no_new_body(tmp_path: Path) -> None:
    path = save_changed(tmp_path / "w.pt", lambda s: (s.pop("fc1.bias"), s.pop("out.bias")))
    with pytest.raises(ModelError, match=r"network: 1 missing \(fc1.bias\); take"):
        load_network(path, new_head=True)


def test_a_projection_head_is_loaded_or_drawn(tmp_path: Path) -> None:
    plain, headed = tmp_path / "plain.pt", tmp_path / "headed.pt"
    module = other_network(head=5)
    torch.save(module.state_dict(), headed)
    assert same_outputs(load_network(headed, head=5), module)
    torch.save(other_network().state_dict(), plain)
    with pytest.raises(
        ModelError, match=r"4 missing .*1 of another shape .*new_head = true to leave head1, head2, out as drawn"
    ):
        load_network(plain, head=5)
    fresh = load_network(plain, head=5, new_head=True)
    assert torch.equal(fresh.fc1.weight, torch.load(plain, weights_only=True)["fc1.weight"])
    with pytest.raises(ModelError, match="4 unexpected"):
        load_network(headed, new_head=True)
    # the body and the head of a file, with other classes
    again = load_network(headed, classes=3, head=5, new_head=True)
    assert torch.equal(again.head2.weight, module.head2.weight) and again.out.weight.shape == (3, 5)


BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def torchvision_names(blocks: tuple[int, ...], convolutions: int, first: bool) -> set[str]:
    """By its convention; `first`: the first stage's first block has a 1×1 shortcut too."""
    names = {"conv1.weight", "fc.weight", "fc.bias", *(f"bn1.{part}" for part in BATCH_NORM)}
    for stage, count in enumerate(blocks, 1):
        for b in range(count):
            at = f"layer{stage}.{b}"
            for k in range(1, convolutions + 1):
                names |= {f"{at}.conv{k}.weight", *(f"{at}.bn{k}.{part}" for part in BATCH_NORM)}
            if b == 0 and (stage > 1 or first):
                names |= {f"{at}.downsample.0.weight", *(f"{at}.downsample.1.{part}" for part in BATCH_NORM)}
    return names


def test_residual_networks_bear_torchvisions_names(tmp_path: Path) -> None:
    with torch.device("meta"):
        small = ResNet18(norm="batch", stem="imagenet").module((3, 64, 64), 1000).state_dict()
        large = ResNet50(norm="batch", stem="imagenet").module((3, 64, 64), 1000).state_dict()
    assert set(small) == torchvision_names((2, 2, 2, 2), 2, False) and len(small) == 122
    assert set(large) == torchvision_names((3, 4, 6, 3), 3, True) and len(large) == 320
    assert small["conv1.weight"].shape == (64, 3, 7, 7) and small["fc.weight"].shape == (1000, 512)
    assert large["layer4.0.conv2.weight"].shape == (512, 512, 3, 3) and large["layer4.0.downsample.0.weight"].shape == (
        2048,
        1024,
        1,
        1,
    )
    torch.save(
        {n: torch.full(t.shape, 0.5) if "tracked" not in n else torch.tensor(9) for n, t in small.items()},
        tmp_path / "resnet18.pth",
    )
    module = ResNet18(
        norm="batch", stem="imagenet", weights=str(tmp_path / "resnet18.pth"), new_head=True
    ).build_module((3, 64, 64), 200)
    assert all(bool((p == 0.5).all()) != n.startswith("fc.") for n, p in module.named_parameters())
    assert bool((module.layer4[1].bn2.running_mean == 0.5).all())


# files that cannot be read --------------------------------------------------------------------------------------

UNREADABLE = (
    "is damaged, of another format, or holds Python objects, which could run code and are not opened; "
    "save the state_dict"
)


@pytest.mark.parametrize("zip", [True, False])
@pytest.mark.parametrize("where", ["alone", "among tensors", "raw"])
def test_code_in_a_pickle_is_not_run(where: str, zip: bool, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "w.pt"
    evil = Evil(mark) if where == "alone" else {**other_network().state_dict(), "x": Evil(mark)}
    if where == "raw":
        path.write_bytes(pickle.dumps(evil))
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=zip)
    with pytest.raises(ModelError, match=UNREADABLE):
        load_network(path)
    assert not mark.exists()
    torch.load(path, weights_only=False) if where != "raw" else pickle.loads(path.read_bytes())
    assert mark.exists()  # so it would have been run


@pytest.mark.parametrize("file", ["w.safetensors", "w.pt"])
@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b[:-20], lambda b: b"", lambda b: bytes(range(256)) * 9]
)
def test_damaged_files_are_refused(file: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path, state = tmp_path / file, other_network().state_dict()
    save_file(state, path) if file == "w.safetensors" else torch.save(state, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=UNREADABLE):
        load_network(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (nn.Linear(2, 2), UNREADABLE),
        ([torch.ones(2)], "holds no tensors by name; save the network's state_dict"),
        (torch.ones(2), "holds no tensors by name"),
        ({}, "holds no tensors by name"),
        (
            {"out.bias": torch.ones(2), "epoch": 3, "lr": 0.1},
            r"holds 2 values that are no tensors \(epoch, lr\); save the state_dict\(\) alone",
        ),
        ({0: torch.ones(2)}, r"holds 1 values that are no tensors"),
        ({"w": torch.eye(2).to_sparse()}, r"holds 1 values that are no tensors \(w\)"),
    ],
)
def test_what_is_no_state_dict_is_refused(content: object, sentence: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=sentence):
        load_network(tmp_path / "w.pt")


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pt", tmp_path, tmp_path / ("a" * 5000), tmp_path / "\0"):
        with pytest.raises(
            ModelError,
            match=r"there is no weights file '.*'; name a .safetensors file or a torch state dict in model.weights",
        ):
            load_network(path)


def test_weights_that_are_not_finite_are_refused_by_the_space(tmp_path: Path) -> None:
    module = MLP().module(SHAPE, 3)
    nn.init.constant_(module.fc1.bias, float("nan"))
    torch.save(module.state_dict(), tmp_path / "w.pt")
    network: Network = MLP(weights=str(tmp_path / "w.pt"))
    with pytest.raises(ModelError, match="not finite"):
        Space(network.build_module(SHAPE, 3))
