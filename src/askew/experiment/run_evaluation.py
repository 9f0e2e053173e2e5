"""What is measured of a run's models after a round, and the model that a run stores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.hooks import correct_hook, fits, is_state, unchanged, wrong_return
from ..core.records import Record, is_record_key
from ..core.task import WithFeatures
from ..core.words import in_words
from ..engine.evaluate import (
    Evaluator,
    accuracy_by_rarity,
    client_spread,
    evaluate_clients,
    mean_private,
    with_private,
)
from ..errors import AlgorithmError
from .build import BuiltRun

HELD_OUT = "held out"  # the name of the main model's scores on the samples that clients hold out; no method has a space


def evaluate_models(built: BuiltRun) -> dict[str, Tensor]:
    """Scores, as `Evaluator` gives them, of each model that the algorithm names, on the device; the main one first.

    Where it is asked for, the main one's on held-out samples are the last.
    """
    server, models = built.server, named_models(built)
    keys = {name: (f"accuracy_{name}", f"loss_{name}") for name in [*models][1:]}
    later = [name for name, two in keys.items() if any(is_record_key(key) or key in server.state for key in two)]
    if taken := [*({HELD_OUT} & models.keys()), *later]:
        raise AlgorithmError(
            f"{server.alg.display_name()}: models() names a model {taken[0]!r}, and the round's record has that name "
            f"for something else; rename it. {correct_hook(server.alg)}"
        )
    scores = {name: evaluate_model(built, built.evaluator, w) for name, w in models.items()}
    if built.validator:
        scores[HELD_OUT] = evaluate_model(built, built.validator, next(iter(models.values())))
    return scores


def named_models(built: BuiltRun) -> dict[str, Tensor]:
    """The models that the algorithm names; the first one is the main one."""
    server = built.server
    with unchanged(server.alg, "models", w=server.w, **{f"server[{n!r}]": t for n, t in server.state.items()}):
        models = server.alg.models(server.w, server.state)
    if not (is_state(models) and models and all(fits(w, server.w) for w in models.values())):
        raise wrong_return(server.alg, "models", f"one model or more by name, each {in_words(server.w)}", models)
    return models


def evaluate_model(built: BuiltRun, evaluator: Evaluator, w: Tensor) -> Tensor:
    """The score of one model: the global one, the mean of the clients' own, or that with the mean of private parts."""
    server, clients = built.server, len(built.fed.eligible)
    if server.alg.evaluates() == "clients" and not server.private.empty:
        return evaluate_clients(evaluator, w, server.buffers, server.private, server.privates, clients)
    return evaluator(*with_mean_private(built, w))


def with_mean_private(built: BuiltRun, w: Tensor) -> tuple[Tensor, Tensor]:
    """A model and its buffers, with the mean of the clients' private parts if that is what is evaluated."""
    server = built.server
    if server.alg.evaluates() != "mean" or server.private.empty:
        return w, server.buffers
    return with_private(w, server.buffers, server.private, mean_private(server.privates, len(built.fed.eligible)))


def main_model(built: BuiltRun) -> tuple[Tensor, Tensor]:
    """The model whose accuracy is reported, and its buffers.

    Where clients' own models are measured, it is the global one, with private parts as they began; of centralised
    training, that of its one client.
    """
    server = built.server
    w, buffers = with_mean_private(built, next(iter(named_models(built).values())))
    if not (server.alg.pooled and len(server.privates)):
        return w, buffers
    row = {n: v[0] for n, v in server.privates.read([0]).items()}
    return with_private(w, buffers, server.private, row)


def evaluation_record(built: BuiltRun, scores: dict[str, Tensor]) -> Record:
    """The entries of a round's record: the scores as plain numbers, and what else is measured of the main model."""
    server, fed, private = built.server, built.fed, built.server.private
    record, models = Record(), {name: score for name, score in scores.items() if name != HELD_OUT}
    for name, (accuracy, loss, *more) in zip(models, torch.stack(list(models.values())).tolist(), strict=True):
        suffix = f"_{name}" if record else ""
        record |= {f"accuracy{suffix}": accuracy if fed.classes else None, f"loss{suffix}": loss}
        if built.config.evaluation.halves and fed.classes and not suffix:
            count, chosen = len(fed.test.y), len(fed.test.y) // 2
            record |= {
                "accuracy_choose": more[0],
                "accuracy_report": (count * accuracy - chosen * more[0]) / (count - chosen),
            }
        if built.config.evaluation.per_class and fed.classes and not suffix:
            right, held = more[-2 * fed.classes : -fed.classes], more[-fed.classes :]
            record["class_accuracy"] = {
                str(k): r / h if h else None for k, (r, h) in enumerate(zip(right, held, strict=True))
            }
    if HELD_OUT in scores:
        accuracy, loss = scores[HELD_OUT].tolist()
        record |= {"accuracy_validation": accuracy if fed.classes else None, "loss_validation": loss}
    if built.config.evaluation.spread and fed.classes:
        clients_own = server.alg.evaluates() == "clients" and not private.empty
        bank = server.privates if clients_own else None
        record |= client_spread(built.task, *main_model(built), fed, private, bank)
    if built.config.evaluation.rare and fed.classes and fed.assignment is not None and private.empty:
        record |= accuracy_by_rarity(built.task, *main_model(built), fed)
    return record


def model_tensors(built: BuiltRun) -> dict[str, Tensor]:
    """The model whose accuracy is reported, by the names of the network's state dictionary.

    What is not trained, frozen weights and whole numbers, is as the network has it.
    """
    space, (w, buffers) = built.space, main_model(built)
    prefix = "module." if isinstance(built.module, WithFeatures) else ""
    trained = {**space.split(w), **space.split_buffers(buffers)}
    named = [*built.module.named_parameters(), *built.module.named_buffers()]
    first = {id(tensor): name for name, tensor in named}  # of tied weights, the name that the space knows
    state = {n: t for n, t in built.module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    tensors = {name: tensor for name, tensor in trained.items() if name in state}
    for name in [name for name in state if name not in tensors]:
        tensor = trained.get(first.get(id(state[name]), name), state[name]).detach()
        tensors[name] = tensor.to(w.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
