"""A table or figure of a paper as tables to paste, from stored results; nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import StoreError, UnknownName, did_you_mean
from ..report.paste import PasteCell, PasteTable, PasteTables
from ..report.paste_runs import MARKS, mark_notes
from ..report.significance import PairedComparison, judge_pairs
from ..report.terminal import command
from .comparison import TableCell, table_cells
from .paper_figures import untrained_table
from .paper_tables import FORMATS, METRIC_HEADINGS, mean_text
from .papers import Experiment
from .plan import Reproduction
from .worked_examples import worked_example

# Whether more (1) or less (−1) is better; neither of the round of the best.
DIRECTIONS = {"best_round": 0, "rounds_to": -1, "last_loss": -1, "set_size_raps": -1, "bytes_up": -1, "bytes_down": -1}
DIRECTIONS |= {"seconds_per_round": -1, "seconds_clients": -1, "seconds_server": -1}
MOST_COLUMNS = 6  # of cases; more of them are rows


def paste_experiment(
    reproduction: Reproduction, made_by: str, against: str | None = None, with_paper: bool = False
) -> PasteTables:
    """The tables of an experiment, one for each metric; differences from a method that are decided are marked."""
    e = reproduction.experiment
    if not e.trains:
        table = untrained(reproduction)
        plain = [dict(zip(table.headings, [name, *(c.text for c in its)], strict=True)) for name, its in table.rows]
        return PasteTables([table], plain, [made_by], e.id)
    cells = table_cells(reproduction)
    if not cells:
        raise StoreError(
            f"no results of {e.id} are stored; askew reproduce {e.id} makes them, or name their folder by --results."
        )
    methods = list(dict.fromkeys(cell.method for cell in cells))
    if against is not None and against not in methods:
        raise UnknownName(f"table: no method is called {against!r} in {e.id}; {did_you_mean(against, methods)}")
    base = against or ("FedAvg" if "FedAvg" in methods else "")
    tuning = reproduction.planned[0].seed if e.choose else None
    tests = case_tests(cells, base, tuning) if base else {}
    metrics = dict.fromkeys(cell.metric for cell in cells)
    tables = [metric_table(reproduction, cells, metric, tests, base, with_paper) for metric in metrics]
    seeds = max(seed for cell in cells for seed in cell.seeds) + 1
    made = [command("reproduce", e.id, "--scale", reproduction.scale, "--seeds", str(seeds)), made_by]
    return PasteTables(tables, [plain_cell(cell, tests) for cell in cells], made, e.id)


# tests ----------------------------------------------------------------------------------------------------------

CaseTests = dict[tuple[str, str, str, str], PairedComparison]  # by case, method, grid point and metric


def case_tests(cells: Sequence[TableCell], base: str, tuning: int | None) -> CaseTests:
    """Every method against `base`, in each case and by each metric; without the seed by which settings were tuned."""
    found: CaseTests = {}
    for case, metric in dict.fromkeys((cell.case, cell.metric) for cell in cells):
        its = [cell for cell in cells if (cell.case, cell.metric) == (case, metric)]
        bases = [cell for cell in its if cell.method == base]
        if len(bases) != 1 or not DIRECTIONS.get(metric, 1):
            continue
        others = [cell for cell in its if cell is not bases[0]]
        pairs = judge_pairs([cell_pairs(cell, bases[0], tuning) for cell in others])
        found |= {(case, cell.method, cell.hyper, metric): test for cell, test in zip(others, pairs, strict=True)}
    return found


def cell_pairs(cell: TableCell, base: TableCell, tuning: int | None) -> PairedComparison:
    """The differences of two cells at the seeds that both have; a target that was not reached has none."""
    values, others = (dict(zip(c.seeds, c.values, strict=True)) for c in (cell, base))
    pairs = {seed: (values[seed], others[seed]) for seed in sorted(values.keys() & others.keys()) if seed != tuning}
    finite = {seed: a - b for seed, (a, b) in pairs.items() if math.isfinite(a) and math.isfinite(b)}
    sign = DIRECTIONS.get(cell.metric, 1)
    differences = list(finite.values())
    return PairedComparison(cell.method, base.method, cell.case, cell.metric, list(finite), differences, {}, [], sign)


# tables ---------------------------------------------------------------------------------------------------------


def metric_table(
    reproduction: Reproduction,
    cells: Sequence[TableCell],
    metric: str,
    tests: CaseTests,
    base: str,
    with_paper: bool,
) -> PasteTable:
    """The table of one metric: methods by cases, or cases by methods where there are many cases."""
    e, its = reproduction.experiment, [cell for cell in cells if cell.metric == metric]
    with_paper = with_paper and any(cell.printed for cell in its)
    cases = list(dict.fromkeys(cell.case for cell in its))
    methods = list(dict.fromkeys(row_name(cell, its) for cell in its))
    at = {(row_name(cell, its), cell.case): cell for cell in its}
    turned = len(cases) > MOST_COLUMNS and len(methods) <= len(cases)
    rows, columns = (cases, methods) if turned else (methods, cases)
    body = list[tuple[str, list[PasteCell]]]()
    for row in rows:
        found = [at.get((column, row) if turned else (row, column)) for column in columns]
        body.append((row, [each for cell in found for each in table_cell(cell, its, tests, with_paper)]))
    headings = ["Case" if turned else "Method"]
    for column in columns:
        headings += [column, "paper"] if with_paper else [column]
    verdicts = [test.verdict for (*_, which), test in tests.items() if which == metric and test.p is not None]
    own = f"{e.title}: {METRIC_HEADINGS.get(metric, metric)}".replace("-\n", "").replace("\n", " ")
    which = f"seeds without {reproduction.planned[0].seed}, which tuned" if e.choose else "seeds"
    notes = [seeds_note(its, reproduction), *mark_notes(verdicts, base, which)]
    return PasteTable(f"{source(e)}. {own}", headings, body, notes)


def source(e: Experiment) -> str:
    """Where a table comes from: "feddpc, Table 2"."""
    return e.id if e.paper == "ours" else f"{e.paper}, {e.where}"


def row_name(cell: TableCell, cells: Sequence[TableCell]) -> str:
    """A method, with its grid point where a case shows several."""
    same = [other for other in cells if (other.case, other.method) == (cell.case, cell.method)]
    return f"{cell.method} {cell.hyper}".strip() if len(same) > 1 else cell.method


def table_cell(
    cell: TableCell | None, cells: Sequence[TableCell], tests: CaseTests, with_paper: bool
) -> list[PasteCell]:
    """Our figure, and the paper's beside it where it is asked for."""
    if cell is None:
        return [PasteCell(None)] * (2 if with_paper else 1)
    paper = [PasteCell(None, text=cell.printed.text if cell.printed else "–")] if with_paper else []
    better, form = DIRECTIONS.get(cell.metric, 1), FORMATS.get(cell.metric, ".4g")
    if not math.isfinite(cell.mean):
        return [PasteCell(None, text=mean_text(cell.values, cell)), *paper]
    peers = [other.mean for other in cells if other.case == cell.case and math.isfinite(other.mean)]
    choose: Callable[[list[float]], float] = max if better > 0 else min
    best = better != 0 and len(peers) > 1 and cell.mean == choose(peers) and min(peers) < max(peers)
    test = tests.get((cell.case, cell.method, cell.hyper, cell.metric))
    mark = MARKS.get(test.verdict, ("", ""))[0] if test else ""
    return [PasteCell(cell.mean, cell.std, form, best, mark), *paper]


def seeds_note(cells: Sequence[TableCell], reproduction: Reproduction) -> str:
    """How many seeds the means are over, and that another scale is not the paper's."""
    counts = sorted({len(cell.seeds) for cell in cells})
    text = "One seed." if counts == [1] else f"Means over {counts[0]} seeds, ± one standard deviation."
    if len(counts) > 1:
        text = f"Means over {counts[0]} to {counts[-1]} seeds, ± one standard deviation where there are several."
    return text if reproduction.scale == "full" else f"{text} Scale {reproduction.scale}: not the paper's settings."


def plain_cell(cell: TableCell, tests: CaseTests) -> dict[str, Any]:
    """A row of the CSV file."""
    test = tests.get((cell.case, cell.method, cell.hyper, cell.metric))
    return {
        "case": cell.case,
        "method": cell.method,
        "hyper": cell.hyper,
        "metric": cell.metric,
        "mean": cell.mean,
        "std": cell.std,
        "seeds": cell.seeds,
        "values": cell.values,
        "paper": cell.printed.value if cell.printed else None,
        "paper_spread": cell.printed.spread if cell.printed else None,
        "difference_from_paper": cell.difference,
        "tested_against": test.against if test and test.p is not None else None,
        "p_holm": test.p_holm if test else None,
        "verdict": test.verdict if test and test.p is not None else None,
    }


# experiments without training -----------------------------------------------------------------------------------


def untrained(reproduction: Reproduction) -> PasteTable:
    """The numbers of an example or of a figure without training."""
    e = reproduction.experiment
    if e.shows == "toy":
        example = worked_example(e.id, reproduction.scale)
        headings, rows = list(example.headings), [list(row) for row in example.rows]
    else:
        headings, rows = untrained_table(reproduction)
    body = [(row[0], [PasteCell(None, text=text) for text in row[1:]]) for row in rows]
    return PasteTable(f"{source(e)}. {e.title}", headings, body)
