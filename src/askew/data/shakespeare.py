"""Shakespeare's plays, every speaking role a client, prepared by LEAF's rules (Caldas et al., 2018, arXiv:1812.01097)."""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..core.rng import generator
from ..core.settings import setting
from ..errors import DataError
from . import files
from .dataset import Dataset, Samples, Source
from .files import Place
from .view import TextWindows

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
AUTHOR = "by William Shakespeare"
LAST_LINE = 124_195  # poems follow
SPEECH, GOES_ON = re.compile(r"  ([A-Za-z][A-Za-z ]*)\. (.*)"), re.compile(r"    (.*)")
# One play is printed without indentation: there any line goes on, until a heading of an act or a notice in <<…>>.
UNINDENTED = "THE COMEDY OF ERRORS"
ITS_SPEECH, ITS_GOES_ON = re.compile(r"([A-Za-z][A-Za-z ]*)\. (.*)"), re.compile(r"(.*)")


def plays(text: str) -> list[tuple[str, dict[str, list[str]]]]:
    """The lines of every role, by plays in the order of the text."""
    lines = text.splitlines()[1:LAST_LINE]
    starts = [i for i, line in enumerate(lines) if AUTHOR in line][1:]  # the first stands above the sonnets
    found = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        title = next((lines[i].strip() for i in range(start - 2, max(start - 8, -1), -1) if lines[i].strip()), "")
        found.append((title, speeches(lines[start + 1 : end], title == UNINDENTED)))
    return found


def speeches(lines: list[str], unindented: bool) -> dict[str, list[str]]:
    """The lines of every role of a play."""
    begins, goes_on = (ITS_SPEECH, ITS_GOES_ON) if unindented else (SPEECH, GOES_ON)
    roles: dict[str, list[str]] = {}
    speaker = ""
    for line in lines:
        if begun := begins.match(line):
            speaker = begun[1].upper()
            if unindented and speaker.startswith("ACT "):
                speaker = ""
            else:
                roles.setdefault(speaker, []).append(begun[2])
        elif speaker and (more := goes_on.match(line)):
            if unindented and more[1].startswith("<"):
                speaker = ""
            else:
                roles[speaker].append(more[1])
    return roles


def spoken(text: str) -> dict[str, str]:
    """What every role says, by PLAY_ROLE; plays with one role and roles with two lines are headings and slips."""
    return {
        re.sub(r"\W", "_", f"{title}_{role}"): re.sub("  +", " ", "".join(f"{line} " for line in lines))
        for title, roles in plays(text)
        if len(roles) >= 2
        for role, lines in roles.items()
        if len(lines) > 2
    }


def decode(where: Place) -> dict[str, Tensor]:
    """All roles' text end to end, and where each begins."""
    [data] = files.contents(where).values()
    roles = [said.encode() for said in spoken(data.decode("ascii")).values()]
    bounds = np.cumsum([0, *map(len, roles)])
    return {
        "text": torch.from_numpy(np.frombuffer(b"".join(roles), np.uint8).copy()),
        "bounds": torch.from_numpy(bounds),
    }


class Shakespeare(Source):
    """The next character after each window of a role's text, the roles in the order of the plays; a client is one role.

    A role's first windows train, as many as share says, then one window's length is skipped and the rest test. The number of
    clients is that of roles drawn among those with more than samples + reserve training windows and enough test windows.
    """

    natural: ClassVar[bool] = True
    idea: ClassVar[str] = files.table["shakespeare"].idea()
    samples: int = setting("training windows of a role, a run from a random start; 0: all", default=0, least=0)
    reserve: int = setting("windows at the end of that run kept out of training", default=0, least=0)
    test: int = setting("test windows of a role, its first; 0: all", default=0, least=0)
    least: int = setting("leave out roles with fewer windows in all", default=0, least=0)
    share: float = setting(
        "share of a role's windows that train, in the order of the text", default=0.9, above=0, below=1
    )
    vocabulary: str = setting(
        "leaf: LEAF's 80 characters; seen: those of the training windows, the reserve's among them, and one for all others",
        default="leaf",
        choices=("leaf", "seen"),
    )
    window: int = setting("characters of an input", default=80, least=1, most=10_000)

    def load(self, seed: int, clients: int) -> Dataset:
        held = files.decoded(files.place("shakespeare"), decode)
        text, bounds = held["text"].numpy(), held["bounds"].numpy()
        windows = np.maximum(np.diff(bounds) - self.window, 0)
        train = (self.share * windows).astype(np.int64)
        test = windows - train - (self.window - 1)
        wanted = self.samples + self.reserve
        fit = np.flatnonzero((train > wanted) & (test >= max(self.test, 1)) & (windows >= self.least))
        if clients > len(fit):
            raise DataError(
                f"Shakespeare: {len(fit):,} roles have more than {wanted:,} training windows, {max(self.test, 1):,} to test and "
                f"{self.least:,} in all, got partition.clients = {clients:,}; set at most {len(fit):,}, or ask less of a role."
            )
        roles = np.sort(generator(seed, "roles").permutation(fit)[:clients])
        run = np.full(clients, wanted) if self.samples else train[roles]
        slack = train[roles] - run
        begin = bounds[roles] + [
            int(generator(seed, "run", client=int(r)).integers(s + 1)) for r, s in zip(roles, slack, strict=True)
        ]
        codes, classes = self.codes(text, begin, run)
        coded = codes[text]
        counts = run - self.reserve
        starts = ranges(begin, counts)
        tried = np.minimum(test[roles], self.test or test[roles])
        tests = ranges(bounds[roles] + train[roles] + self.window - 1, tried)
        pooled, held_out = (
            Samples(torch.from_numpy(at), torch.from_numpy(coded[at + self.window]).long()) for at in (starts, tests)
        )
        owner, test_owner = (np.repeat(np.arange(clients), n) for n in (counts, tried))
        return Dataset(
            pooled,
            held_out,
            classes,
            owner,
            view=TextWindows(torch.from_numpy(coded), self.window),
            test_owner=test_owner,
        )

    def codes(self, text: np.ndarray, begin: np.ndarray, run: np.ndarray) -> tuple[np.ndarray, int]:
        """The number of every byte, and how many numbers there are."""
        if self.vocabulary == "leaf":
            symbols, size = np.frombuffer(ALPHABET.encode(), np.uint8), len(ALPHABET)
        else:
            symbols = np.unique(
                np.concatenate([text[a : a + n + self.window - 1] for a, n in zip(begin, run, strict=True)])
            )
            size = len(symbols) + 1
        codes = np.full(256, size - 1, np.uint8)
        codes[symbols] = np.arange(len(symbols))
        return codes, size


def ranges(begin: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """begin, begin + 1, … for every count, end to end."""
    ends = np.cumsum(counts)
    return np.repeat(begin - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
