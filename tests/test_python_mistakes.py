"""Typical mistakes with networks, hooks and settings, in Python and in a shell: a sentence names each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import askew
from askew.algorithms import FedAvg
from askew.cli.main import main
from askew.core.algorithm import Algorithm
from askew.errors import AlgorithmError, AskewError, ModelError, Remark

X, Y = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 4
BASE: dict[str, Any] = {"data": (X, Y), "clients": 3, "cohort": 3, "rounds": 1, "partition": "iid", "progress": False}
Attempt = Callable[[], object]


def run(what: Any = None, **changes: Any) -> Attempt:
    """`askew.run` on small data, with these keywords."""
    return lambda: askew.run(what, **{**BASE, **changes})


def method(parent: type[Algorithm] = FedAvg, **names: Any) -> Algorithm:
    """An own method with these hooks and attributes."""
    return type("Own", (parent,), {"__module__": __name__, **names})()


class Net(nn.Module):
    """A network whose forward pass ends with a function of what its layer gives."""

    def __init__(self, last: Callable[[Tensor], Any], outputs: int = 4) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, outputs), last

    def forward(self, x: Tensor) -> Any:
        return self.last(self.layer(x))


class Sized(Net):
    """A network that cannot be made without an argument."""

    def __init__(self, outputs: int) -> None:
        super().__init__(lambda out: out, outputs)


def part(base: type[Any], name: str, function: Any) -> Any:
    """A partition, participation, dataset or network of one's own, with this method."""
    return type("Own", (base,), {"__module__": __name__, name: function})()


def in_place(self: Any, w: Tensor, up: Any, cohort: Any, server: Any) -> Any:
    return w.add_(cohort.p @ up["delta"]), server


def mean_criterion(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def regression(criterion: Any) -> askew.Dataset:
    samples = askew.Samples(X, X[:, :1])
    return askew.Dataset(samples, samples, classes=0, criterion=criterion)


def in_large(small: Callable[[Tensor], Any], large: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    """A criterion that does something else with batches of more samples than are tried before a run."""
    return lambda o, y: (small if len(y) <= 3 else large)((o - y).square().sum(1))


def targets_in_place(output: Tensor, y: Tensor) -> Tensor:
    y -= 1
    return (output - y).square().sum(1)


def targets_by_numpy(output: Tensor, y: Tensor) -> Tensor:
    np.sign(values := y.numpy(), out=values)
    return (output - y).square().sum(1)


DETACHED = in_large(lambda losses: losses, lambda losses: losses.detach())
LINE = nn.Linear(6, 1)
NETWORKS: dict[str, tuple[Attempt, str]] = {
    "too few outputs": (run(model=nn.Linear(6, 2)), "network Linear has 2 outputs, and the data have 4 classes"),
    "a dict": (run(model=Net(lambda out: {"logits": out})), "Net must return its output, .* returned a dict with 'log"),
    "a list": (run(model=Net(lambda out: [out])), "returned a value of type list"),
    "a tuple of one": (run(model=Net(lambda out: (out,))), r"returned \(a tensor of shape \[2, 4\]"),
    "nothing": (run(model=Net(lambda out: None)), "returned None"),
    "the batch lost": (run(model=Net(lambda out: out.mean(0))), "one row for each input, .* keep the first dimension"),
    "a number each": (run(model=Net(lambda out: out.sum(1))), "Net has no row of outputs, and the data have 4"),
    "lazy layer": (run(model=nn.LazyLinear(4)), "LazyLinear has a lazy layer, .* call the network once"),
    "lazy, made": (run(model=lambda: nn.Sequential(nn.LazyLinear(4))), "Sequential has a lazy layer, '0'"),
    "other inputs": (run(model=nn.Linear(7, 4)), r"cannot take inputs of shape \(6,\): mat1 and mat2"),
    "nothing to train": (run(model=nn.Linear(6, 4).requires_grad_(False)), "no trainable parameter"),
    "needs arguments": (run(model=Sized), "model=Sized is called without arguments, .*'outputs'.*lambda: Sized"),
    "makes no network": (run(model=lambda: 3), "must make a network, an nn.Module, and made a value of type int"),
    "a number as model": (run(model=3), "model must be a network's name, .* got int"),
    "a plug-in without a network": (
        lambda: type("Bare", (askew.Network,), {"module": lambda self, shape, classes: None})().build_module((6,), 4),
        r"module\(\) of the network Bare must return an nn.Module, got NoneType; end it",
    ),
    "misspelt model": (run(model="sofmax"), "unknown model 'sofmax'; did you mean 'softmax'"),
    "other targets": (run(model=LINE, data=(X, X[:, :2])), r"returns \[1\] numbers .* a target has shape \[2\]"),
    "criterion averages": (run(model=LINE, data=regression(mean_criterion)), "one loss for each sample, .*average"),
    "criterion without gradient": (
        run(model=LINE, data=regression(lambda o, y: (o - y).square().sum(1).detach()), engine="stacked"),
        "losses that the criterion returned have no gradient",
    ),
    "network without gradient": (
        run(model=Net(lambda out: out.detach()), engine="vmapped"),
        "the output of the network Net has no gradient",
    ),
    "one output": (run(model=LINE), "network Linear has 1 output, and the data have 4 classes"),
    "a batch of one lost": (
        run(model=Net(lambda out: out.squeeze())),
        r"one row for each input, and returned a tensor of shape \[4\] .* for a batch of one; .* instead of squeeze",
    ),
    "criterion of one number": (
        run(model=LINE, data=regression(in_large(lambda losses: losses, lambda losses: float(losses.mean())))),
        "one loss for each sample, .* returned a value of type float; leave out",
    ),
    "criterion of nothing": (
        run(model=LINE, data=regression(in_large(lambda losses: losses, lambda losses: None)), engine="stacked"),
        "one loss for each sample, .* returned None; leave out",
    ),
    "criterion fails in rows": (
        run(
            model=LINE,
            data=regression(in_large(lambda losses: losses, lambda losses: float(losses.mean()))),
            engine="vmapped",
        ),
        "the criterion failed in line .*test_python_mistakes.py': RuntimeError: vmap.*; correct the criterion",
    ),
    "criterion changes targets": (
        run(model=LINE, data=regression(targets_in_place)),
        "the criterion changes the targets in place, .* y = y - 1 instead of y -= 1",
    ),
    "criterion changes targets by numpy": (
        run(model=LINE, data=regression(targets_by_numpy)),
        "the criterion changes the targets in place",
    ),
    **{
        f"criterion without gradient later, {engine}": (
            run(model=LINE, data=regression(DETACHED), engine=engine),
            "the loss has no gradient, so that nothing would be trained; let the network and the criterion compute",
        )
        for engine in ("sequential", "vmapped", "stacked", "slots")
    },
    "network without gradient later": (
        run(model=Net(lambda out: out if len(out) <= 3 else out.detach()), engine="vmapped"),
        "the loss has no gradient, so that nothing would be trained",
    ),
    "network fails on a batch": (
        run(model=Net(lambda out: out if len(out) <= 3 else out.view(7, 4))),
        "the network failed in line .*test_python_mistakes.py': RuntimeError: shape .*; correct the network",
    ),
    "criterion fails": (run(model=LINE, data=regression(lambda o, y: 1 / 0)), "criterion failed on the output"),
}


class Looking(Algorithm):
    """A phase that measures each client's model on samples that it holds out."""

    after = ("validation",)

    def aggregate(self, w: Tensor, up: Any, cohort: Any, server: Any) -> Any:
        return w, server


class Counting(Looking):
    """A phase that needs label counts."""

    after, needs = (), ("labels",)


class Keeping(Looking):
    """A phase that declares a state, which is the method's to declare."""

    after = ()

    def client_state(self, space: Any) -> Any:
        return {"own": space.zeros()}


def in_phases(phase: type[Algorithm]) -> Attempt:
    return run(method(phases=lambda self: (phase(), self)))


def ragged(self: Any, theta: Tensor, client: Any) -> Any:
    return {"delta": theta - client.w, "size": theta.new_zeros(round(100 * float(client.size)))}, {}


def stored(self: Any, w: Tensor, up: Any, cohort: Any, server: Any) -> Any:
    self.old = w
    return w, server


HOOKS: dict[str, tuple[Attempt, str]] = {
    "models of clients without private parts": (
        run(method(evaluates=lambda self: "clients", client_state=lambda self, space: {"own": space.zeros()})),
        r"Own: evaluates\(\) returned 'clients', and the class has no private\(\)",
    ),
    "a phase looks at what nobody holds out": (
        in_phases(Looking),
        r"needs 'validation', .*needs = \('validation',\)",
    ),
    "a phase needs label counts": (in_phases(Counting), r"Counting needs 'labels', .* needs = \('labels',\) in Own"),
    "a phase keeps state": (in_phases(Keeping), r"Keeping has client_state\(\), .* write client_state\(\) in Own"),
    "uploads of many shapes": (
        run(method(finish=ragged), clients=7, cohort=7),
        r"Own: finish\(\) must return the same upload for all clients, .*'size': a tensor of shape \[102\]",
    ),
    "the method changed": (
        run(method(aggregate=stored)),
        r"Own: aggregate\(\) failed in line .*mistakes.py': FrozenInstanceError: .*; all clients share the method",
    ),
    "a number's name": (
        run(method(server_state=lambda self, space: {"clock": space.scalar(0.0)})),
        "Own: 'clock' is a name of the round's record; rename",
    ),
    "the name of a file's checksum": (
        run(method(server_state=lambda self, space: {"checksum": space.scalar(0.0)})),
        "Own: 'checksum' is a name of the round's record; rename",
    ),
    "the name of a number of deployments": (
        run(method(server_state=lambda self, space: {"wire_up": space.scalar(0.0)})),
        "Own: 'wire_up' is a name of the round's record; rename",
    ),
    "a model's name and a number's": (
        run(
            method(
                server_state=lambda self, space: {"loss_slow": space.scalar(0.0)},
                models=lambda self, w, server: {"global": w, "slow": w},
            )
        ),
        r"models\(\) names a model 'slow', and the round's record has that name",
    ),
    "a model's name": (
        run(method(models=lambda self, w, server: {"global": w, "validation": w})),
        r"models\(\) names a model 'validation', and the round's record has that name",
    ),
    "misspelt hook": (run(method(agregate=in_place)), "Own: 'agregate' is no hook .* did you mean 'aggregate'"),
    "misspelt attribute": (run(method(brodcast=("g",))), "'brodcast' is no hook .* did you mean 'broadcast'"),
    "no aggregate": (run(method(Algorithm)), r"Own has no aggregate\(w, up, cohort, server\), .* derive"),
    "fewer arguments": (run(method(aggregate=lambda self, w, up: w)), r"is called with .*takes \(self, w, up\)"),
    "a hook that is none": (run(method(begin=3)), r"begin must be a function begin\(self, client\), and is 3"),
    "broadcast as text": (run(method(broadcast="g")), "broadcast must be a tuple of names, .* got 'g'"),
    "broadcast of nothing": (run(method(broadcast=("g",))), "broadcast names 'g', and .* declare nothing"),
    "unknown look": (run(method(before=("grad",))), "before names the look 'grad'; there are gradient and validation"),
    "evaluates whom": (run(method(evaluates=lambda self: "client")), r"evaluates\(\) must return one of global, "),
    "phases in a list": (run(method(phases=lambda self: [self])), r"phases\(\) must return a tuple of algorithms"),
    "no part": (run(method(private=lambda self, space: [1])), r"private\(\) must return a part"),
    "no parts": (run(method(parts=lambda self, space: {"a": 3})), r"parts\(\) must return a dictionary of parts"),
    "wrong shape": (run(method(direction=lambda self, theta, grad, client: theta[1:])), r"direction\(\) must return "),
    "weights of another type": (
        run(method(weights=lambda self, up, cohort: cohort.p.double())),
        r"weights\(\) must return a weight for each client, .*float32, and returned .*float64",
    ),
    "model in place": (run(method(aggregate=in_place)), r"aggregate\(\) changed w in place, .* a \+ b instead of"),
    "memory in place": (
        run(
            method(
                memory=lambda self, space: {"m": space.zeros()},
                aggregate=lambda self, w, up, cohort, server: (w, {"m": server["m"].add_(up["delta"])}),
            )
        ),
        r"aggregate\(\) changed server\['m'\] in place",
    ),
    "losses in place": (
        run(
            method(
                aggregate=lambda self, w, up, cohort, server: (
                    w + cohort.loss.div_(cohort.loss.sum()) @ up["delta"],
                    server,
                )
            )
        ),
        r"aggregate\(\) changed cohort.loss in place",
    ),
    **{
        f"{what} in place by weights": (run(method(weights=hook)), rf"Own: weights\(\) changed {what} in place, .* use")
        for what, hook in {
            r"up\['delta'\]": lambda self, up, cohort: (up["delta"].mul_(0.5), cohort.p)[1],
            "cohort.loss": lambda self, up, cohort: cohort.loss.div_(cohort.loss.sum()),
            "cohort.size": lambda self, up, cohort: cohort.size.div_(cohort.size.sum()),
            "cohort.staleness": lambda self, up, cohort: (cohort.staleness.add_(0), cohort.p)[1],
        }.items()
    },
    "measured model in place": (
        run(method(models=lambda self, w, server: {"half": w.mul_(0.5)})),
        r"Own: models\(\) changed w in place",
    ),
    "theta in place by .data": (
        run(method(direction=lambda self, theta, grad, client: (theta.data.clamp_(-0.01, 0.01), grad(theta))[1])),
        r"Own: a hook changes in place what it is given, .* instead of a.add_\(b\), a \+= b or a.data.add_\(b\)",
    ),
    "samples in place by numpy": (
        run(
            method(
                loss=lambda self, task, theta, batch, client: (
                    (batch.x.numpy().clip(0, 1, batch.x.numpy()), 0)[1] + task.loss(theta, batch)
                )
            )
        ),
        "Own: a hook changes in place what it is given",
    ),
    "theta in place": (
        run(method(direction=lambda self, theta, grad, client: theta.sub_(grad(theta)))),
        r"direction\(\) changed theta in place",
    ),
    "gradient in place": (
        run(method(direction=lambda self, theta, grad, client: grad(theta).mul_(0.5)), engine="stacked"),
        r"direction\(\) changed grad\(theta\) in place",
    ),
    "gradient in place under vmap": (
        run(method(direction=lambda self, theta, grad, client: grad(theta).mul_(0.5)), engine="vmapped"),
        r"direction\(\) changed grad\(theta\) in place",
    ),
    "received model in place": (
        run(method(finish=lambda self, theta, client: ({"delta": client.w.sub_(theta)}, {})), engine="stacked"),
        r"finish\(\) changed client.w in place",
    ),
    "in place under vmap": (
        run(method(direction=lambda self, theta, grad, client: client.w.sub_(theta)), engine="vmapped"),
        r"direction\(\) failed in line .*test_python_mistakes.py'.*change nothing in place",
    ),
    "not sent": (
        run(method(direction=lambda self, theta, grad, client: client.server["g"])),
        r"direction\(\) failed in line .*: KeyError: 'g'; a client finds in client.server what .* broadcast",
    ),
    "a number out of a tensor": (
        run(method(direction=lambda self, theta, grad, client: theta * theta.sum().item()), engine="vmapped"),
        r"direction\(\) failed .*leave out .item",
    ),
    "a branch on a tensor": (
        run(method(begin=lambda self, client: client.w if client.w.sum() > 0 else -client.w), engine="vmapped"),
        r"begin\(\) failed .*do not branch on a tensor",
    ),
    "a hook that raises": (
        run(method(finish=lambda self, theta, client: 1 / 0)),
        r"Own: finish\(\) failed in line .*: ZeroDivisionError: division by zero; correct the hook",
    ),
    "begin with a gradient": (
        run(method(begin=lambda self, client: client.w.requires_grad_()), engine="stacked"),
        r"Own: begin\(\) returned a tensor that requires a gradient; return it without",
    ),
    "carry with a gradient": (
        run(method(carry=lambda self, client: {"g": client.w.clone().requires_grad_()})),
        r"Own: carry\(\) returned a tensor that requires a gradient",
    ),
    "direction with a gradient": (
        run(method(direction=lambda self, theta, grad, client: grad(theta) * torch.ones((), requires_grad=True))),
        r"Own: direction\(\) returned a tensor that requires a gradient",
    ),
    "weights that sum to 2": (
        run(method(weights=lambda self, up, cohort: 2 * cohort.p)),
        r"weights\(\) must return weights of 0 or more that sum to 1, .* sum 2; divide",
    ),
    "negative weights": (
        run(method(weights=lambda self, up, cohort: 2 * cohort.p - cohort.p.flip(0).cumsum(0))),
        r"weights\(\) must return weights of 0 or more",
    ),
    "weights not finite": (
        run(method(weights=lambda self, up, cohort: cohort.p / 0)),
        r"weights\(\) must return weights of 0 or more that sum to 1, .*inf",
    ),
    "one name for two states": (
        run(method(server_state=lambda self, s: {"h": s.zeros()}, memory=lambda self, s: {"h": s.zeros()})),
        r"Own: server_state\(\) and memory\(\) both declare 'h', .*; rename one",
    ),
    "combines what": (run(method(combines="foo")), "combines must be one of mean, rows, .*, got 'foo'"),
    "exact as text": (run(method(exact="yes")), "Own: exact must be True or False, got 'yes'"),
    "title as number": (run(method(title=3)), "Own: title must be a text, got 3"),
    "needs what is not": (run(method(needs=("label",)), model="softmax"), r"offers label\(x\), .*may need labels,"),
    "labels of a regression": (
        run(method(needs=("labels",)), data=regression("squared_error"), model=nn.Linear(6, 1)),
        "Own needs label counts, and a regression has no classes",
    ),
}

SETTINGS: dict[str, tuple[Attempt, str]] = {
    "register without a name": (lambda: askew.register(FedAvg), r'write @askew.register\("mine"\)'),  # type: ignore[arg-type]
    "a built-in's name": (lambda: askew.register("fedavg")(type(method())), "'fedavg' exists already; choose another"),
    "first argument": (run(3), "first argument must be a method's name .* got int"),
    "a table with a name": (run({"name": "fedprox"}), "unknown setting 'name'; write algorithm.name"),
    "two methods": (run(FedAvg, method="fedprox"), "both name a method"),
    "misspelt method": (run("scafold"), "did you mean 'scaffold'"),
    "another method's setting": (run("fedavg", mu=0.1), "unknown setting algorithm.mu"),
    "no such keyword": (run(optimizer="adam"), "unknown setting algorithm.optimizer"),
    "several seeds": (run(seeds=[0, 1]), r"askew.sweep\(…, seeds=\[0, 1, 2\]\)"),
    "several rates": (run(lr=[0.1, 0.2]), r"lr must be a number, got \[0.1, 0.2\]"),
    "two rates": (run(lr=0.1, local={"lr": 0.2}), r"lr = 0.1 and local = {'lr': 0.2} contradict each other; leave one"),
    "swept and given": (lambda: askew.sweep(over={"lr": [0.1]}, lr=0.2), "sweep: lr is given twice; leave it out"),
    "swept by two words": (
        lambda: askew.sweep(over={"lr": [0.1], "local.lr": [0.2]}),
        "sweep: local.lr is given twice",
    ),
    "seeds twice": (lambda: askew.sweep(over={"seed": [7, 8]}, seeds=3), "both name the seeds; leave one of them out"),
    "watch": (run(watch=3), "watch must be a function"),
    "out": (run(out=3), "out must be a folder, got int"),
    "device": (run(device="gpu"), "unknown device 'gpu'; allowed are auto, cpu"),
    "batches of one under batch norm": (
        run(model=nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), local={"batch": 1}),
        "local.batch = 1 leaves nothing to train on, as batch norm takes batches of two .*; set local.batch to 2",
    ),
    "cohort": (run(cohort=400), "cohort must be at most the number of clients, 3"),
    "sweep over a text": (lambda: askew.sweep(over={"lr": "0.1"}), "lr must be a list of values, got '0.1'"),
    "sweep over nothing": (lambda: askew.sweep(over={"lr": []}), "local.lr must be a list of one value or more"),
    "sweep over what is not": (lambda: askew.sweep(over={"learning_rate": [1]}), "'learning_rate'; write local.lr"),
    "compare a number": (lambda: askew.compare(3), "a run, a run folder or a list of them is compared, got int"),  # type: ignore[arg-type]
    "compare nothing": (lambda: askew.compare([]), "there is no run to compare"),
    "compare nowhere": (lambda: askew.compare("nowhere"), "there is no run folder 'nowhere'"),
}
NAMED_PARTS: dict[str, tuple[Attempt, str]] = {
    "a partition": (
        lambda: part(askew.Partition, "split", lambda self, labels, seed: None).divide(Y.numpy(), 0),
        "Own: split",
    ),
    "a participation": (
        lambda: part(askew.Participation, "sample", lambda self, seed, round: None).draw(0, 1, np.arange(3), 3),
        r"Own: sample\(\) is called with \(self, seed, round, eligible, clients\), and takes \(self, seed, round\)",
    ),
    "arguments by keyword alone": (
        lambda: part(askew.Partition, "split", lambda self, labels, seed, *, owner: None).divide(Y.numpy(), 0),
        r"called with \(self, labels, seed, owner\), and takes \(self, labels, seed, \*, owner\); correct",
    ),
    "no function": (
        lambda: part(askew.Partition, "split", 5).divide(Y.numpy(), 0),
        r"Own: split must be a function split\(self, labels, seed, owner\), and is 5; correct",
    ),
    "a dataset": (run(data=part(askew.Source, "load", lambda self, seed: None), partition=None), "Own: load"),
    "a network": (run(model=part(askew.Network, "module", lambda self, shape: None)), "Own: module"),
}
SHELL = {  # what is typed, by what is said
    "run scaffold": "type askew run --method scaffold",
    "run --method scafold": "did you mean 'scaffold'",
    "run --set lr=0.1": "write local.lr",
    "sweep --over local.lr": "--over takes key=value,value",
    "compare nowhere": "there is no run folder 'nowhere'",
    "report": "missing argument 'RUN...'; askew report takes RUN...",
    "lists": "no such command 'lists'",
    "plot": "no such command 'plot'. Did you mean 'report', 'deploy'? commands are",
}


def attempts(cases: dict[str, tuple[Attempt, str]]) -> list[Any]:
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize(("attempt", "says"), attempts(NETWORKS | HOOKS | SETTINGS | NAMED_PARTS))
def test_one_sentence_names_the_mistake(attempt: Attempt, says: str) -> None:
    with pytest.raises(AskewError, match=says) as caught:
        attempt()
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize("line", SHELL)
def test_one_sentence_in_a_shell(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert SHELL[line].lower() in err.lower() and err.count("\n") == 1 and err.startswith("error: ")


def no_grad_loss(self: Any, task: Any, theta: Tensor, batch: Any, client: Any) -> Tensor:
    with torch.no_grad():
        loss: Tensor = task.loss(theta, batch)
    return loss


WITHOUT_GRADIENT = {
    "no_grad": no_grad_loss,
    "detached": lambda self, task, theta, batch, client: task.loss(theta, batch).detach(),
    "constant": lambda self, task, theta, batch, client: theta.new_ones(()),
}


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "stacked", "slots"])
@pytest.mark.parametrize("loss", WITHOUT_GRADIENT)
def test_a_loss_without_a_gradient_is_refused_in_every_engine(loss: str, engine: str) -> None:
    with pytest.raises(AlgorithmError, match=r"^Own: loss\(\) returned a number that has no gradient, .*\.$"):
        run(method(loss=WITHOUT_GRADIENT[loss]), engine=engine)()


def test_what_is_wrong_in_a_later_round_alone_is_refused_too() -> None:
    def weights(self: Any, up: Any, cohort: askew.Cohort) -> Tensor:
        return cohort.p * (1.0 if cohort.round < 2 else 2.0)

    def loss(self: Any, task: Any, theta: Tensor, batch: Any, client: askew.Client) -> Any:
        value = task.loss(theta, batch)
        return value if float(client.round) < 3 else value.detach()  # rounds 1 and 2 are tried before a run

    def criterion(output: Tensor, y: Tensor) -> Tensor:
        losses = torch.nn.functional.cross_entropy(output, y, reduction="none")
        return losses if len(y) <= 3 else losses.mean()

    with pytest.raises(
        AlgorithmError, match=r"Own: weights\(\) must .* and in round 2 it returned .* with the sum 2; "
    ):
        run(method(weights=weights), rounds=3)()
    for engine in ("sequential", "vmapped"):
        with pytest.raises(AlgorithmError, match=r"^Own: loss\(\) returned a number that has no gradient"):
            run(method(loss=loss), engine=engine, rounds=3)()
        with pytest.raises(
            ModelError, match=r"the criterion must return one loss for each sample, .* of shape \[\] and"
        ):
            run(data=askew.Dataset(askew.Samples(X, Y), askew.Samples(X, Y), 4, criterion=criterion), engine=engine)()


def test_batches_of_two_under_batch_norm_are_trained_on() -> None:
    network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    assert run(model=network, local={"batch": 2})().rounds[-1]["train_loss"] is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("total", [1, 2])
def test_weights_that_a_report_of_nan_spoils_are_not_the_methods_fault(total: int) -> None:
    """The clients with this report are left out, as with weights of askew's own; the weights of the others count."""

    def finish(self: Any, theta: Tensor, client: askew.Client) -> Any:
        report = torch.where(torch.as_tensor(client.size) > 1, torch.nan, 1.0).to(theta.dtype)
        return {"delta": theta - client.w, "a": report}, client.state

    own = method(finish=finish, weights=lambda self, up, cohort: total * up["a"] / up["a"].sum())
    samples, owner = askew.Samples(X, Y), torch.arange(60).numpy() % 7 // 3  # of three clients, the last has least
    attempt = run(own, data=askew.Dataset(samples, samples, classes=4, owner=owner), partition="natural")
    if total == 1:
        assert attempt().rounds[-1]["dropped"] == 2  # type: ignore[attr-defined]
    else:
        with pytest.raises(AlgorithmError, match="with the sum 2;"):
            attempt()


def test_clients_that_are_all_nan_are_not_silent() -> None:
    with pytest.warns(Remark, match="fedavg, seed 0: diverged: in round 1 nothing was finite"):
        run(model=Net(lambda out: out * float("nan")))()


def test_helpers_may_be_called_nearly_as_hooks() -> None:
    """A name that the class itself uses is no slip of the pen."""

    class Own(FedAvg):
        def weight(self, cohort: askew.Cohort) -> Tensor:
            return cohort.p

        def weights(self, up: dict[str, Tensor], cohort: askew.Cohort) -> Tensor:
            return self.weight(cohort)

        def noted(self) -> int:
            return 1

    run(Own)()
    assert other_use(Own) == 1


def other_use(cls: type[Algorithm]) -> int:
    """Something beside the class that uses one of its helpers."""
    return int(cls().noted())  # type: ignore[attr-defined]


def test_a_memory_may_have_the_name_of_a_recorded_number() -> None:
    """It is not recorded, other than server state."""
    assert run(method(memory=lambda self, space: {"loss": space.zeros()}))()
