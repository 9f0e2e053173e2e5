"""Write what follows from the code and the stored results: configuration.md, algorithms.md, the stored catalogue that
`askew list` reads, the speeds by which runs are priced, and in README.md the table of methods and the ledger's
findings, which it takes from reproduction.md.

python docs/generate.py

tests/test_docs.py compares the pages with what this file writes, so they are always up to date.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from askew.algorithms import algorithms
from askew.core.algorithm import Algorithm
from askew.core.settings import Settings, toml_text
from askew.core.space import Space
from askew.data.images import Images
from askew.data.partition import Partition
from askew.experiment import listing
from askew.experiment.catalogue import catalogue_text, parameters
from askew.experiment.config import CHOICES, DEFAULT_NAMES, OPTIONAL_TABLES, TABLES, Config, TopLevel
from askew.models import Network
from askew.participation import Participation
from askew.reproduction import cost
from askew.reproduction.results import read_results

DOCS = Path(__file__).parent
CATALOGUE = catalogue_text()
README = DOCS.parent / "README.md"

# what each table of the configuration is for, by its name
TABLE_PURPOSE = {
    "data": "The samples.",
    "partition": "Which client holds which samples.",
    "participation": "Which clients take part in a round.",
    "model": "The network. It is built for the shape of the inputs and the number of classes.",
    "algorithm": "The method. [Algorithms](algorithms.md) has the equations, papers and settings of each.",
}

# the class whose settings several choices of a table share, by the table's name, and what these choices are
SHARED: dict[str, tuple[type[Settings], str]] = {
    "data": (Images, "image dataset"),
    "partition": (Partition, "partition"),
    "participation": (Participation, "participation model"),
    "model": (Network, "network"),
}

# exceptions from a table's default, by its name
DEFAULT_EXCEPTION = {"partition": ", or `natural` for data that are already divided among clients"}

CONFIGURATION = """# Configuration

This page is generated from the code by `python docs/generate.py`.

A run is described by one TOML file. Every setting has a default, so a file names only what differs from the defaults;
an empty file is valid. An unknown key, a wrong type or a value out of range is refused before anything runs, with one
sentence that says what is allowed. On the command line `--set table.key=value` changes one setting. In Python the
tables are keyword arguments of [`askew.run`](first-run.md#the-same-in-python).

The whole configuration, with every default filled in, is stored in the run folder as `run.toml`. The folder's name ends
with a hash of it.

This is the whole configuration with its defaults:

```toml
{defaults}```

Keys whose default is *left out* do not appear there, because TOML has no null. To use such a default, leave the key
out. Tables that most runs do not need ({optional}) are stored
only if a setting in them differs from its default.
"""

ALGORITHMS = """# Algorithms

This page is generated from the code by `python docs/generate.py`. Each section has the documentation at the top of the
method's file, what the method declares, its settings, and the file itself, to be read next to the paper.

{overview}

*Exact* is a claim: with skewed data and partial participation the method converges to the optimum itself, not to a
point near it. [Concepts](concepts.md#what-exact-means) gives the conditions and shows how it is measured.

Letters in the equations:

| letter | meaning |
| --- | --- |
| w | the global model |
| θ_i | the local model of client i |
| δ_i = θ_i − w | its displacement |
| g | the gradient on a mini-batch |
| L_i, ∇L_i | the mean loss of client i's samples, and its gradient |
| η, η_0 | the local learning rate `local.lr`, and that of the first round |
| K_i | the number of local steps of client i |
| n_i, n̄ | the number of samples of client i, and its mean over clients |
| p_i | the weight of client i in averages; the weights sum to 1 |
| s | the factor `server_scale` on the server's step; with `server_lr` it is `server_lr` / η |
| S, m, N | the participants of a round, their number, and the number of all clients that hold samples |
| mean_S, mean_N | plain averages over the participants, and over all clients |
| t | the number of the round, from 1 |
| CE, ℓ | the cross-entropy of a batch (or the loss of your data), and a method's loss |

A letter that a method explains itself has that meaning there. Local steps are written for `local.momentum = 0` and
`local.weight_decay = 0`; [Concepts](concepts.md#local-training) has the whole step.

The next table shows what each method sends and stores, in multiples of the model's size. `askew list algorithms` prints
the same numbers. They are measured in one round of two clients on a small network with batch norm. *Sent* is per
participant and round. *Stored* is state that is kept from round to round: at the server, at a client that has taken
part, and at the server for each client that has taken part.

{costs}"""


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines) + "\n"


def settings_table(rows: list[list[str]]) -> str:
    """The table of some settings: key, type, default, range and meaning."""
    return table(("key", "type", "default", "allowed", "meaning"), rows) if rows else "No settings.\n"


def settings_rows(cls: type[Settings]) -> list[list[str]]:
    """The rows of the table of a class's settings, its own first."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    rows = []
    for parameter in parameters(cls):
        name, field = parameter["name"], fields[parameter["name"]]
        choices = ", ".join(f"`{choice}`" for choice in field.metadata.get("choices") or ())
        allowed = choices or ("any" if parameter["allowed"] == parameter["type"] else parameter["allowed"])
        default = "left out" if field.default is None else f"`{literal(field.default)}`"
        tries = ", ".join(literal(value) for value in field.metadata.get("tries") or ())
        told = (parameter["doc"], field.metadata.get("hint", "").rstrip("."), tries and f"`askew tune` tries {tries}")
        meaning = "; ".join(filter(None, told))
        rows.append([f"`{name}`", parameter["type"], default, allowed, meaning])
    return rows


def literal(value: object) -> str:
    """A value as TOML, with double quotes."""
    return toml_text(value).replace("'", '"')


def configuration_page() -> str:
    """The page of every setting."""
    top_level = settings_table(settings_rows(TopLevel))
    optional = ", ".join(f"`[{name}]`" for name in OPTIONAL_TABLES)
    parts = [CONFIGURATION.format(defaults=Config().toml(), optional=optional), "## Outside any table\n", top_level]
    for name in CHOICES:
        parts += choice_section(name)
    for name, kind in (TABLES | OPTIONAL_TABLES).items():
        parts += [f"## [{name}]\n", f"{inspect.getdoc(kind)}\n", settings_table(settings_rows(kind))]
    return "\n".join(parts)


def choice_section(name: str) -> list[str]:
    """The section of a table whose key `name` selects a choice; the settings of methods are on their own page."""
    members: Mapping[str, Any] = CHOICES[name].members
    methods = name == "algorithm"
    default = f"`{DEFAULT_NAMES[name]}`{DEFAULT_EXCEPTION.get(name, '')}"
    names = {key: f"[`{key}`](algorithms.md#{key})" if methods else f"`{key}`" for key in members}
    parts = [
        f"## [{name}]\n",
        wrap(f"{TABLE_PURPOSE[name]} `name` selects one of these; the default is {default}. Other keys depend on it."),
        table(("name", "description"), ([names[key], member.idea] for key, member in members.items())),
    ]
    if methods:
        return parts
    base, what = SHARED[name]
    shared, heading = settings_rows(base), f"Settings of every {what}"
    link = f"[{heading[0].lower()}{heading[1:]}](#{heading.lower().replace(' ', '-')})"
    parts += [f"### {heading}\n", settings_table(shared)]
    for key, member in members.items():
        parts.append(f"### {name}.name = {key}\n")
        if doc := own_docstring(member):
            parts.append(docstring_markdown(doc))
        own = [row for row in settings_rows(member) if row not in shared]
        if own or not issubclass(member, base):
            parts.append(settings_table(own))
        if issubclass(member, base):
            parts.append(f"Also the {link}.\n" if own else f"Only the {link}.\n")
    return parts


def own_docstring(cls: type[Settings]) -> str:
    """The docstring that was written for a class; empty if it is the signature that a dataclass has otherwise."""
    doc = (inspect.getdoc(cls) or "").strip()
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def wrap(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def docstring_markdown(doc: str) -> str:
    """A docstring as Markdown: indented equations become blocks that the site typesets, arXiv numbers become links."""
    blocks = []
    for block in re.split(r"\n\s*\n", doc.strip()):
        lines = block.splitlines()
        if all(line.startswith("    ") for line in lines):
            blocks.append("\n".join(["```equation", *(line[4:] for line in lines), "```"]))
        else:
            one_line = " ".join(block.split())
            linked = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", one_line)
            blocks.append(wrap(linked).rstrip())
    return "\n\n".join(blocks) + "\n"


def overview(page: str = "") -> str:
    """The table of methods, for algorithms.md and for README.md; each links to its section of the page."""
    rows = (
        [f"[`{key}`]({page}#{key})", cls.paper, cls.idea, "yes" if cls.exact else ""]
        for key, cls in algorithms.members.items()
    )
    return table(("method", "paper", "idea", "exact"), rows).rstrip()


def algorithms_page() -> str:
    """The page of every method."""
    parts = [ALGORITHMS.format(overview=overview(), costs=costs())]
    for key, cls in algorithms.members.items():
        module = inspect.getmodule(cls)
        assert module is not None and module.__doc__ is not None
        file = f"src/{module.__name__.replace('.', '/')}.py"
        parts += [f"## {key}\n", docstring_markdown(module.__doc__), declarations(cls())]
        parts.append(settings_table(settings_rows(cls)))
        parts.append(f'??? example "{file}"\n\n    ``` {{ .python }}\n    --8<-- "{file}"\n    ```\n')
    return "\n".join(parts)


def costs() -> str:
    """The table of what each method sends and stores, as `askew list algorithms` measures it."""
    heads = (
        *("method", "sent down", "sent up", "stored at the server", "stored at a client"),
        *("stored at the server per client", "default weights"),
    )
    weights = {"samples": "by samples", "uniform": "equal"}
    rows = []
    for entry in json.loads(CATALOGUE)["algorithms"]:
        sizes = (entry[what] for what in ("down", "up", "server_state", "client_state", "memory"))
        cells = ("" if size is None else f"{size:.1f}".removesuffix(".0") for size in sizes)
        rows.append([f"[`{entry['name']}`](#{entry['name']})", *cells, weights[entry["weighting"]]])
    return table(heads, rows)


def declarations(alg: Algorithm) -> str:
    """A list of what a method declares, asked of the method itself."""
    space = Space(Config().model.module((1, 8, 8), 10))
    passes = {"before": "before the first step", "each": "after every step", "after": "after the last step"}
    evaluated = {
        "global": "the global model",
        "clients": "every client's own model",
        "mean": "the global model with the mean of the private parts",
    }
    others = list(alg.models(space.start, alg.server_state(space)))[1:]
    facts = {
        "Exact": "yes" if alg.exact else "no",
        "Default weights": {"samples": "by sample count", "uniform": "equal"}[alg.weighting],
        "Server state": code_names(alg.server_state(space)),
        "Client state": code_names(alg.client_state(space)),
        "Memory": code_names(alg.memory(space)),
        "Broadcast": code_names(alg.broadcast),
        "Full passes over a client's data": ", ".join(
            f"{when}: {code_names(getattr(alg, name))}" for name, when in passes.items() if getattr(alg, name)
        ),
        "Needs": code_names(alg.needs),
        "Evaluated": evaluated[alg.evaluates()] + (f"; also {code_names(others)}" if others else ""),
    }
    return "\n".join(f"- **{name}**: {value}" for name, value in facts.items() if value) + "\n"


def code_names(names: Iterable[str]) -> str:
    """Names as inline code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def readme() -> str:
    """README.md with its table of methods and its findings renewed; the other text is written by hand."""
    text = README.read_text(encoding="utf-8")
    text = re.sub(r"^- \*\*\[FedDPC\].*?(?=\n\n)", lambda _: findings(), text, count=1, flags=re.MULTILINE | re.DOTALL)
    return re.sub(
        r"^\| method \| paper \|.*?(?=\n\n)",
        lambda _: overview("docs/algorithms.md"),
        text,
        count=1,
        flags=re.MULTILINE | re.DOTALL,
    )


def findings() -> str:
    """The findings of the ledger, one line for each paper, with links from README.md."""
    text = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.partition("\n\n*Column*")[0].splitlines() if line.startswith("| [")]
    return "\n".join(
        f"- **{paper[2:].replace('](', '](docs/')}**: better than the others? "
        f"**{answer.strip('*').capitalize()}.** {finding}"
        for paper, answer, finding, *_ in rows
    )


def pages() -> dict[Path, str]:
    """The text of each page, by its path."""
    return {
        DOCS / "configuration.md": configuration_page(),
        DOCS / "algorithms.md": algorithms_page(),
        README: readme(),
        listing.PATH: CATALOGUE,
        cost.SPEEDS: cost.speeds_text(read_results(README.parent / cost.RESULTS, leave_out=True)),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
