"""Write the pages that follow from the code, so that they cannot drift from it: configuration.md and algorithms.md.

    python docs/generate.py            write both pages
    python docs/generate.py overview   print the table of methods that README.md holds
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import askew
from askew.algorithms import algorithms
from askew.core.algorithm import Algorithm
from askew.core.settings import Settings, allowed, plain, spoken, types_of
from askew.core.space import Space
from askew.experiment.config import CHOICES, NAMES, TABLES, Config, Top

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent

ABOUT = {
    "data": "Which samples there are.",
    "partition": "Who holds which of them. If `[data]` comes divided among clients (`synthetic`, `synthetic_leaf`), "
    'the default is `name = "natural"`.',
    "participation": "Who takes part in a round.",
    "model": "The network. It is built for the shape of the inputs and the number of classes.",
    "algorithm": "The method. [Algorithms](algorithms.md) has the equations, the papers and what follows from the settings.",
}

CONFIGURATION = """# Configuration

This page is generated from the code by `python docs/generate.py`.

A run is one page of TOML. Every setting has a default, so a file names only what differs; an empty file is a valid one. An unknown
key, a wrong type or a value out of range is refused before anything runs, with one sentence that says what is allowed. On the command
line `--set table.key=value` overrides one setting; in Python the tables are keywords of [`askew.run`](first-run.md#the-same-in-python).

The resolved page, with every default filled in, is stored in the run folder as `run.toml`. A hash of it ends the folder's name.

This is the whole page with its defaults:

```toml
{page}```

Keys whose default is *left out* do not appear there, as TOML has no null; leave such a key out to get it.
"""

ALGORITHMS = """# Algorithms

This page is generated from the code by `python docs/generate.py`. Each section is the text at the head of the method's file, then what
the method declares, its settings, and the file itself, to be read beside the paper.

{overview}

*Exact* is a claim: with skewed data and partial participation the method reaches the optimum itself, not a point beside it.
[Concepts](concepts.md#what-exact-means) says what it rests on and shows how it is measured.

The letters in the equations: w the global model, θ_i client i's local model, δ_i = θ_i − w its displacement, g a mini-batch gradient,
η the local rate and η_0 the first round's, K_i the number of local steps, n_i the number of samples and n̄ its mean, p_i the weights
(they sum to 1), S the participants of a round, N all clients that hold samples, mean_S and mean_N plain averages over them.

*Traffic* is counted by playing one round on `digits` with the default network, in multiples of the model's length, for one participant.
"""


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines) + "\n"


def settings_table(cls: type[Settings], leave: Iterable[str] = ()) -> str:
    """Every field of a class: type, default, range and meaning."""
    kinds, rows = types_of(cls), []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in leave:
            continue
        kind = kinds[field.name]
        choices = field.metadata.get("choices") or ()
        limits = ", ".join(f"`{choice}`" for choice in choices) or allowed(field, kind).removeprefix(spoken(kind)).strip()
        default = "left out" if field.default is None else f"`{literal(field.default)}`"
        meaning = "; ".join(filter(None, (field.metadata.get("doc", ""), field.metadata.get("hint", "").rstrip("."))))
        rows.append([f"`{field.name}`", spoken(kind), default, limits or "any", meaning])
    return table(("key", "type", "default", "allowed", "meaning"), rows) if rows else "No settings.\n"


def literal(value: object) -> str:
    return plain(value).replace("'", '"')


def configuration() -> str:
    """The page of every key."""
    parts = [CONFIGURATION.format(page=Config().toml()), "## Outside any table\n", settings_table(Top)]
    for name, registry in CHOICES.items():
        parts += [f"## [{name}]\n", f"{ABOUT[name]} `name` chooses; the default is `{NAMES[name]}`. The other keys depend on it.\n"]
        members: Mapping[str, Any] = registry.members
        parts.append(table(("name", "what it is"), ([f"`{key}`", member.idea] for key, member in members.items())))
        for key, member in members.items():
            parts += [f"### {name}.name = {key}\n", settings_table(member)]
            if name != "algorithm" and (inspect.getdoc(member) or "").strip():
                parts.insert(-1, quoted(inspect.getdoc(member) or ""))
    for name, kind in TABLES.items():
        parts += [f"## [{name}]\n", f"{inspect.getdoc(kind)}\n", settings_table(kind)]
    return "\n".join(parts)


def quoted(doc: str) -> str:
    """A docstring as Markdown: indented equations become code blocks, arXiv numbers links."""
    blocks = []
    for block in re.split(r"\n\s*\n", doc.strip()):
        lines = block.splitlines()
        if all(line.startswith("    ") for line in lines):
            blocks.append("\n".join(["```text", *(line[4:] for line in lines), "```"]))
        else:
            blocks.append(re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", block))
    return "\n\n".join(blocks) + "\n"


def overview() -> str:
    """The methods in one table, for this page and for the README."""
    rows = ([f"`{key}`", cls.paper, cls.idea, "yes" if cls.exact else ""] for key, cls in algorithms.members.items())
    return table(("method", "paper", "idea", "exact"), rows).rstrip()


def algorithm_page() -> str:
    """The page of every method."""
    parts = [ALGORITHMS.format(overview=overview())]
    for key, cls in algorithms.members.items():
        module = inspect.getmodule(cls)
        assert module is not None and module.__doc__ is not None
        file = Path(inspect.getfile(cls)).relative_to(REPOSITORY).as_posix()
        parts += [f"## {key}\n", quoted(module.__doc__), declared(key, cls()), settings_table(cls)]
        parts.append(f'??? example "{file}"\n\n    ```py\n    --8<-- "{file}"\n    ```\n')
    return "\n".join(parts)


def declared(key: str, alg: Algorithm) -> str:
    """What a method declares and what that costs, asked of the method itself."""
    config = Config()
    module = config.model.module((1, 8, 8), 10)
    space = Space(module)
    run = askew.run(key, rounds=1, cohort=2, seed=0)
    lengths = {way: getattr(run, f"bytes_{way}") / (2 * 4 * space.P) for way in ("down", "up")}
    looks = {"before": "before training", "each": "after every step", "after": "after training"}
    kept = {
        "exact": "yes, see above for what it rests on" if alg.exact else "no",
        "default weights": {"samples": "by sample count", "uniform": "equal"}[alg.weighting],
        "server keeps": names(alg.server_state(space)),
        "each client keeps": names(alg.client_state(space)),
        "sent down beside the model": names(alg.broadcast),
        "full-gradient pass": ", ".join(words for look, words in looks.items() if getattr(alg, look)) or "none",
        "traffic": f"{lengths['down']:.3g} down, {lengths['up']:.3g} up",
        "evaluated": {"global": "the global model", "clients": "the clients' own models", "mean": "the mean of the private parts"}[
            alg.evaluates()
        ],
        "models measured": ", ".join(alg.models(space.start, alg.server_state(space))),
    }
    return table(("declares", ""), ([what, how] for what, how in kept.items()))


def names(entries: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in entries) or "nothing"


def pages() -> dict[str, str]:
    """The generated pages by file name."""
    return {"configuration.md": configuration(), "algorithms.md": algorithm_page()}


if __name__ == "__main__":
    if sys.argv[1:] == ["overview"]:
        print(overview())
    else:
        for name, text in pages().items():
            (DOCS / name).write_text(text, encoding="utf-8")
