"""Shakespeare's plays, every speaking role a client, prepared by LEAF's rules.

Caldas et al., 2018, arXiv:1812.01097.
"""

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
from .files import DatasetLocation
from .transform import TextWindows

# The 80 characters of LEAF, in the order of their codes.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
AUTHOR = "by William Shakespeare"  # stands below the title of every play
LAST_LINE = 124_195  # of the file, counted from 0: here the plays end and poems follow
# The first line of a speech, with the role's name, and the lines that continue it.
FIRST_LINE, NEXT_LINE = re.compile(r"  ([A-Za-z][A-Za-z ]*)\. (.*)"), re.compile(r"    (.*)")
# One play is printed without indentation: there any line continues, until a heading of an act or a notice in <<…>>.
UNINDENTED_PLAY = "THE COMEDY OF ERRORS"
UNINDENTED_FIRST_LINE, UNINDENTED_NEXT_LINE = re.compile(r"([A-Za-z][A-Za-z ]*)\. (.*)"), re.compile(r"(.*)")


def split_plays(text: str) -> list[tuple[str, dict[str, list[str]]]]:
    """Title and the lines of every role of each play, in the order of the text."""
    lines = text.splitlines()[1:LAST_LINE]
    starts = [i for i, line in enumerate(lines) if AUTHOR in line][1:]  # the first stands above the sonnets
    plays = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        title = next((lines[i].strip() for i in range(start - 2, max(start - 8, -1), -1) if lines[i].strip()), "")
        plays.append((title, split_roles(lines[start + 1 : end], title == UNINDENTED_PLAY)))
    return plays


def split_roles(lines: list[str], unindented: bool) -> dict[str, list[str]]:
    """The lines of every role of a play."""
    first_line, next_line = (UNINDENTED_FIRST_LINE, UNINDENTED_NEXT_LINE) if unindented else (FIRST_LINE, NEXT_LINE)
    roles: dict[str, list[str]] = {}
    speaker = ""
    for line in lines:
        if first := first_line.match(line):
            speaker = first[1].upper()
            if unindented and speaker.startswith("ACT "):
                speaker = ""
            else:
                roles.setdefault(speaker, []).append(first[2])
        elif speaker and (more := next_line.match(line)):
            if unindented and more[1].startswith("<"):
                speaker = ""
            else:
                roles[speaker].append(more[1])
    return roles


def text_of_roles(text: str) -> dict[str, str]:
    """All that every role says, by PLAY_ROLE; plays of one role and roles of two lines are headings and misprints."""
    return {
        re.sub(r"\W", "_", f"{title}_{role}"): re.sub("  +", " ", "".join(f"{line} " for line in lines))
        for title, roles in split_plays(text)
        if len(roles) >= 2
        for role, lines in roles.items()
        if len(lines) > 2
    }


def decode(location: DatasetLocation) -> dict[str, Tensor]:
    """The text of all roles end to end, uint8, and where each role begins, int64 [roles + 1]."""
    [data] = files.read_all(location).values()
    roles = [text.encode() for text in text_of_roles(data.decode("ascii")).values()]
    bounds = np.cumsum([0, *map(len, roles)])
    return {
        "text": torch.from_numpy(np.frombuffer(b"".join(roles), np.uint8).copy()),
        "bounds": torch.from_numpy(bounds),
    }


class Shakespeare(Source):
    """The next character after each window of a role's text, the roles in the order of the plays; a client is one role.

    The first windows of a role are for training (the fraction `share`), then one window's length is skipped, and the
    others are for testing. Clients are roles drawn at random among those with more than samples + reserve training
    windows and enough test windows.
    """

    natural: ClassVar[bool] = True
    idea: ClassVar[str] = files.table["shakespeare"].idea()
    samples: int = setting("consecutive training windows of a role, from a random start; 0: all", default=0, least=0)
    reserve: int = setting("further windows after these, which are not trained on", default=0, least=0)
    test: int = setting("number of test windows of a role, the first ones; 0: all", default=0, least=0)
    least: int = setting("leave out roles with fewer windows in all", default=0, least=0)
    share: float = setting(
        "fraction of a role's windows for training, the first in the text", default=0.9, above=0, below=1
    )
    vocabulary: str = setting(
        "leaf: LEAF's 80 characters; seen: those of the training windows, the reserve's among them, "
        "and one for all others",
        default="leaf",
        choices=("leaf", "seen"),
    )
    window: int = setting("characters of an input", default=80, least=1, most=10_000)

    def load(self, seed: int, clients: int) -> Dataset:
        arrays = files.load_decoded(files.locate("shakespeare"), decode)
        text, bounds = arrays["text"].numpy(), arrays["bounds"].numpy()
        windows = np.maximum(np.diff(bounds) - self.window, 0)  # of every role
        train = (self.share * windows).astype(np.int64)
        test = windows - train - (self.window - 1)
        roles = self.draw_roles(windows, train, test, seed, clients)
        # Of every role drawn: the length of its run of training windows, where the run begins, and its test windows.
        run = np.full(clients, self.samples + self.reserve) if self.samples else train[roles]
        begin = bounds[roles] + [
            int(generator(seed, "run", client=int(role)).integers(slack + 1))
            for role, slack in zip(roles, train[roles] - run, strict=True)
        ]
        train_counts = run - self.reserve
        test_counts = np.minimum(test[roles], self.test or test[roles])
        train_starts = join_ranges(begin, train_counts)
        test_starts = join_ranges(bounds[roles] + train[roles] + self.window - 1, test_counts)
        codes, classes = self.codes(text, begin, run)
        coded = codes[text]
        train_samples, test_samples = (
            Samples(torch.from_numpy(starts), torch.from_numpy(coded[starts + self.window]).long())
            for starts in (train_starts, test_starts)
        )
        owner, test_owner = (np.repeat(np.arange(clients), counts) for counts in (train_counts, test_counts))
        transform = TextWindows(torch.from_numpy(coded), self.window)
        return Dataset(train_samples, test_samples, classes, owner, transform=transform, test_owner=test_owner)

    def draw_roles(
        self, windows: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int, clients: int
    ) -> np.ndarray:
        """Random roles with enough windows, ascending, [N]; the arguments are every role's numbers of windows."""
        wanted = self.samples + self.reserve
        suitable = np.flatnonzero((train > wanted) & (test >= max(self.test, 1)) & (windows >= self.least))
        if clients > len(suitable):
            raise DataError(
                f"Shakespeare: {len(suitable):,} roles have more than {wanted:,} training windows, "
                f"{max(self.test, 1):,} to test and {self.least:,} in all, got partition.clients = {clients:,}; "
                f"set at most {len(suitable):,}, or ask less of a role."
            )
        return np.sort(generator(seed, "roles").permutation(suitable)[:clients])

    def codes(self, text: np.ndarray, begin: np.ndarray, run: np.ndarray) -> tuple[np.ndarray, int]:
        """The code of every byte, uint8 [256], and how many codes there are."""
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


def join_ranges(begin: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers begin[i] … begin[i] + counts[i] − 1 for every i, end to end."""
    ends = np.cumsum(counts)
    return np.repeat(begin - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
