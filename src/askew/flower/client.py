"""A client of a deployment: it answers the server's letters with the simulator's own local training."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..core.types import State
from ..data.federation import RoundPlan
from ..engine.base import PhaseInputs, PhaseRequest
from ..engine.evaluate import with_private
from ..errors import DataError
from ..experiment.checkpoint import layout_digest
from ..version import __version__
from .client_state import Kept, Place
from .deployment_data import Home
from .privacy import clipped, noisy
from .wire import Payload, RawPayload, Refused, Shared, expect, opened, over, told, under

SERVER = "the server"
STAGES = ("keys", "shares", "unmask")  # of secure aggregation, beside the training itself
RATES = ("lr", "lr0", "momentum", "decay", "clip")
OWN = ("steps", "tau", "size", "coin")


def hello(home: Home) -> Payload:
    """Who this is and what it has; no sample and no label is told."""
    fed = home.fed
    own = fed.inputs(fed.test.x[:1])
    numbers = {
        "client": home.client,
        "samples": int(fed.sizes[home.client]),
        "classes": fed.classes,
        "shape": [int(n) for n in fed.shape],
        "real": own.is_floating_point(),
        "digest": home.config.digest(),
        "version": __version__,
    }
    return Payload(numbers, {})


class Client:
    """Answers training and evaluation letters."""

    def __init__(self, home: Home, place: Place, vault: MutableMapping[str, Any] | None = None) -> None:
        self.vault, self.privacy = {} if vault is None else vault, home.config.privacy
        self.home, self.house, self.client = home, home.house, home.client
        self.server, self.space = self.house.server, self.house.space  # of the server only what it declares
        self.shared = Shared(self.space, self.server.private)
        private = {
            "w": self.space.start[self.server.private.indices],
            "b": self.space.buffers[self.server.private.buffer_indices],
        }
        start = over("mine.", self.server.alg.client_state(self.space)) | (
            {} if self.server.private.empty else over("private.", private)
        )
        self.kept = Kept(place, start, self.client)

    def answer(self, kind: str, letter: RawPayload) -> Payload:
        """The answer to a letter of training ("train" and its stages) or evaluation ("evaluate")."""
        expect(letter, SERVER, mark=layout_digest(self.house.config.digest(), self.server), client=self.client)
        if kind.startswith("train."):
            return self.stage(kind.removeprefix("train."), letter)
        return self.train(letter) if kind == "train" else self.evaluate(letter)

    def train(self, letter: RawPayload) -> Payload:
        """One phase of one round."""
        round, n, used = (told(letter, name, int, SERVER) for name in ("round", "phase", "used"))
        if n >= len(self.server.phases):
            raise Refused(
                f"{SERVER}: this is of phase {n}, expected one of {len(self.server.phases)} from 0; start the run over."
            )
        phase, last = self.server.phases[n], n + 1 == len(self.server.phases)
        names = phase.broadcast
        state = {
            k: v.to(self.space.dtype) if v.is_floating_point() else v
            for k, v in self.server.state.items()
            if k in names
        }
        memory = {k: v for k, v in self.server.memory.start.items() if k in names}
        sent = self.shared.forms(state, "server.") | self.shared.forms(memory, "memory.")
        if "x" in letter.parcels or n == 0:
            sent |= self.shared.forms({"x": self.space.start} | self.shared.buffers(self.space.buffers))
        tensors = self._here(opened(letter, sent, SERVER))
        before = self._here(self.kept.after(used) if n == 0 else self.kept.between(round, n))
        x, buffers = self._model(tensors, before)
        plan = self._plan(letter, round)
        lr, lr0, momentum, decay, clip = (told(letter, name, float, SERVER) for name in RATES)
        own = [[told(letter, name, float, SERVER)] for name in OWN]
        steps, tau, size, coin = torch.tensor(own, dtype=self.space.dtype, device=self.space.device)
        server = self.shared.whole(under("server.", tensors), state)
        rest = (
            rows(self.shared.whole(under("memory.", tensors), memory)),
            rows(under("mine.", before)),
            rows(under("carry.", before)),
        )
        parts = self.server.parts
        inbox = PhaseInputs(
            x, buffers, server, *rest, parts, lr, lr0, momentum, decay, clip, round, steps, tau, size, coin
        )
        (out,) = self.server.engine.run([PhaseRequest(phase, inbox, plan, ("w", "carry"))])
        up, mine, carry = ({k: v[0] for k, v in part.items()} for part in (out.up, out.mine, out.carry))
        assert out.w is not None
        after = over("mine.", mine)
        if not self.server.private.empty:
            after |= {
                "private.indices": out.w[0][self.server.private.indices],
                "private.buffer_indices": out.buffers[0][self.server.private.buffer_indices],
            }
        if last:
            self.kept.keep(used, round, after)
        else:
            self.kept.keep_between(used, round, n + 1, after | over("carry.", carry) | {"x": x, "buffers": buffers})
        told_up = self._shown(self.shared.cut(up)) | (self.shared.buffers(out.buffers[0]) if phase.trains else {})
        loss = 0.0 if self.privacy.clip else float(out.loss[0])  # which is measured on the same samples
        if self.privacy.secure:
            weight = float(size) if self.server.alg.by_samples else 1.0
            told_up, loss = {"hidden": self._hidden(letter, told_up, weight, loss)}, 0.0
        numbers = {
            "client": self.client,
            "round": round,
            "phase": n,
            "loss": loss,
            "samples": int(self.home.fed.sizes[self.client]),
        }
        return Payload(numbers, told_up)

    def _shown(self, up: State) -> State:
        """What of an upload the server may see."""
        if self.privacy.clip:
            up = clipped(up, self.privacy.clip)
        if self.privacy.local:
            up = {name: noisy(t, self.privacy.noise * self.privacy.clip) for name, t in up.items()}
        return over("up.", up)

    def _hidden(self, letter: RawPayload, tensors: State, weight: float, loss: float) -> Tensor:
        """Tensors by their weight, and the loss, under the masks of secure aggregation."""
        from .secure import Hidden, pressed

        flat = [weight * tensors[name].flatten().double().cpu() for name in sorted(tensors)]
        words = pressed(torch.cat([*flat, torch.tensor([loss], dtype=torch.float64)]))
        hidden = Hidden(self.vault, self.client, self.privacy.fewest, SERVER).hide(stage_of(letter), letter, words)
        return torch.from_numpy(hidden.view("int64"))

    def stage(self, name: str, letter: RawPayload) -> Payload:
        """One of the stages of secure aggregation in which nobody trains."""
        from .secure import Hidden

        if not self.privacy.secure or name not in STAGES:
            raise Refused(
                f"{SERVER}: a stage {name!r:.20} of secure aggregation was asked for, and this run has none; start the run over."
            )
        opened(letter, {}, SERVER)
        place, hidden = stage_of(letter), Hidden(self.vault, self.client, self.privacy.fewest, SERVER)
        stages = {"keys": hidden.keys, "shares": hidden.shares, "unmask": hidden.unmask}
        found = stages[name](place, letter)
        round, n = (told(letter, part, int, SERVER) for part in ("round", "phase"))
        return Payload({"client": self.client, "round": round, "phase": n, **found}, {})

    def _here(self, state: State) -> State:
        return {name: t.to(self.space.device) for name, t in state.items()}

    def _model(self, tensors: State, before: State) -> tuple[Tensor, Tensor]:
        """The model as received, in a later phase the one of the phase before unless another came; private parts in place."""
        if "x" in tensors:
            x = self.shared.whole({"x": tensors["x"]}, {"x": self.space.start})["x"]
            buffers = self.shared.whole_buffers(tensors, self.space.buffers)
        else:
            x, buffers = before["x"], before["buffers"]
        return (
            (x, buffers)
            if self.server.private.empty
            else with_private(x, buffers, self.server.private, under("private.", before))
        )

    def _plan(self, letter: RawPayload, round: int) -> RoundPlan:
        """This round's batches; as many as the server counts on."""
        plan, steps = self.server.prepare(round, [self.client]), told(letter, "steps", float, SERVER)
        if not 1 <= steps <= plan.train[0].batches:
            raise DataError(
                f"client {self.client} has {plan.train[0].batches} batches, and the server counts on {steps:g}; its data have changed: "
                "start the run over."
            )
        return plan._replace(train=[plan.train[0].first(int(steps))])

    def evaluate(self, letter: RawPayload) -> Payload:
        """The scores of the server's models, private parts in place, on this client's test set."""
        round, used = (told(letter, name, int, SERVER) for name in ("round", "used"))
        names = told(letter, "models", str, SERVER).split(",")
        forms = self.shared.forms(
            {f"model.{name}": self.space.start for name in names} | self.shared.buffers(self.space.buffers)
        )
        tensors = self._here(opened(letter, forms, SERVER))
        numbers: dict[str, int | list[float]] = {"client": self.client, "round": round, "samples": 0}
        if self.home.tested:
            numbers["samples"] = len(self.home.fed.test.y)
            before = self._here(self.kept.after(used))
            for name in names:
                model = {"x": tensors[f"model.{name}"]} | {n: t for n, t in tensors.items() if n == "buffers"}
                numbers[f"scores.{name}"] = self.house.evaluator(*self._model(model, before)).tolist()
        return Payload(numbers, {})


def stage_of(letter: RawPayload) -> str:
    """Which sum this is about."""
    return "round {}, phase {}".format(*(told(letter, part, int, SERVER) for part in ("round", "phase")))


def rows(state: State) -> State:
    """A cohort of one."""
    return {name: t[None] for name, t in state.items()}
