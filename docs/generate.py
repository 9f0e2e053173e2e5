"""Write the pages that follow from the code, so that they cannot drift from it: configuration.md and algorithms.md.

python docs/generate.py            write both pages
python docs/generate.py overview   print the table of methods that README.md holds
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from askew.algorithms import algorithms
from askew.core.algorithm import Algorithm
from askew.core.settings import Settings, toml_text
from askew.core.space import Space
from askew.experiment.catalogue import entries, parameters
from askew.experiment.config import CHOICES, DEFAULT_NAMES, TABLES, Config, TopLevel

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"

ABOUT = {
    "data": "Which samples there are.",
    "partition": "Who holds which of them.",
    "participation": "Who takes part in a round.",
    "model": "The network. It is built for the shape of the inputs and the number of classes.",
    "algorithm": "The method. [Algorithms](algorithms.md) has the equations, the papers and what follows from the settings.",
}

EXCEPT = {"partition": ", and `natural` for data that come divided among clients"}

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

What each method sends and keeps, in multiples of the model. `askew list algorithms` prints the same numbers; it measures them by
playing one round of two clients on a small network with batch norm. *Sent* is for one participant and round. *Kept* is state from round
to round: at the server, at a client that has taken part, and at the server for each client that has taken part.

{costs}"""


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines) + "\n"


def settings_table(cls: type[Settings]) -> str:
    """Every field of a class, its own first: type, default, range and meaning."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    rows = []
    for told in parameters(cls):
        name, field = told["name"], fields[told["name"]]
        choices = ", ".join(f"`{choice}`" for choice in field.metadata.get("choices") or ())
        limits = choices or ("any" if told["allowed"] == told["type"] else told["allowed"])
        default = "left out" if field.default is None else f"`{literal(field.default)}`"
        meaning = "; ".join(filter(None, (told["doc"], field.metadata.get("hint", "").rstrip("."))))
        rows.append([f"`{name}`", told["type"], default, limits, meaning])
    return table(("key", "type", "default", "allowed", "meaning"), rows) if rows else "No settings.\n"


def literal(value: object) -> str:
    return toml_text(value).replace("'", '"')


def configuration() -> str:
    """The page of every key."""
    parts = [CONFIGURATION.format(page=Config().toml()), "## Outside any table\n", settings_table(TopLevel)]
    for name, registry in CHOICES.items():
        parts += [
            f"## [{name}]\n",
            f"{ABOUT[name]} `name` chooses; the default is `{DEFAULT_NAMES[name]}`{EXCEPT.get(name, '')}. The other keys depend on it.\n",
        ]
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
    parts = [ALGORITHMS.format(overview=overview(), costs=costs())]
    for key, cls in algorithms.members.items():
        module = inspect.getmodule(cls)
        assert module is not None and module.__doc__ is not None
        file = f"src/{module.__name__.replace('.', '/')}.py"
        parts += [f"## {key}\n", quoted(module.__doc__), declared(cls()), settings_table(cls)]
        parts.append(f'??? example "{file}"\n\n    ``` {{ .python }}\n    --8<-- "{file}"\n    ```\n')
    return "\n".join(parts)


def costs() -> str:
    """What each method sends and keeps, as `askew list algorithms` measures it."""
    rows = []
    for told in entries("algorithms"):
        numbers = (told[what] for what in ("down", "up", "server_state", "client_state", "memory"))
        weights = {"samples": "by samples", "uniform": "equal"}[told["weighting"]]
        rows.append(
            [
                f"[`{told['name']}`](#{told['name']})",
                *("" if n is None else f"{n:.1f}".removesuffix(".0") for n in numbers),
                weights,
            ]
        )
    return table(
        ("method", "sent down", "sent up", "at the server", "at a client", "at the server, of a client", "weights"),
        rows,
    )


def declared(alg: Algorithm) -> str:
    """What a method declares, asked of the method itself."""
    space = Space(Config().model.module((1, 8, 8), 10))
    looks = {"before": "before the first step", "each": "after every step", "after": "after the last step"}
    measured = {
        "global": "the global model",
        "clients": "every client's own model",
        "mean": "the global model with the mean private parts",
    }
    others = list(alg.models(space.start, alg.server_state(space)))[1:]
    facts = {
        "Exact": "yes" if alg.exact else "no",
        "Default weights": {"samples": "by sample count", "uniform": "equal"}[alg.weighting],
        "Server state": names(alg.server_state(space)),
        "Client state": names(alg.client_state(space)),
        "Memory": names(alg.memory(space)),
        "Broadcast": names(alg.broadcast),
        "Full passes": ", ".join(
            f"{words}: {names(getattr(alg, look))}" for look, words in looks.items() if getattr(alg, look)
        ),
        "Needs": names(alg.needs),
        "Evaluated": measured[alg.evaluates()] + (f"; also {names(others)}" if others else ""),
    }
    return "\n".join(f"- **{what}**: {how}" for what, how in facts.items() if how) + "\n"


def names(given: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in given)


def readme() -> str:
    """The README with its table of methods renewed; all else is written by hand."""
    text = README.read_text(encoding="utf-8")
    return re.sub(
        r"^\| method \| paper \|.*?(?=\n\n)", lambda _: overview(), text, count=1, flags=re.MULTILINE | re.DOTALL
    )


def pages() -> dict[Path, str]:
    """What this file writes."""
    return {DOCS / "configuration.md": configuration(), DOCS / "algorithms.md": algorithm_page(), README: readme()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
