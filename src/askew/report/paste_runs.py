"""A comparison of runs as tables to paste."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..experiment.store import Run
from .paste import BETTER_MARK, WORSE_MARK, PasteCell, PasteTable, PasteTables
from .tables import ComparisonRow, RunGroup, by_federation, group_runs
from .terminal import command, comparison_remarks, resume_command

if TYPE_CHECKING:
    from .significance import PairedComparison

# Of a verdict: its mark, and the words that explain the mark.
MARKS = {"better": (BETTER_MARK, "better"), "worse": (WORSE_MARK, "worse")}


class PasteColumn(NamedTuple):
    """A column of the pasted comparison."""

    heading: str
    key: str  # of a row of `table`
    better: int  # 1: more is better, −1: less is
    form: str
    scale: float = 1


COLUMNS = (
    PasteColumn("Best acc. (%)", "best_accuracy", 1, ".2f", 100),
    PasteColumn("Last acc. (%)", "final_accuracy", 1, ".2f", 100),
    PasteColumn("Worst tenth (%)", "worst_clients_accuracy", 1, ".2f", 100),
    PasteColumn("Test loss", "test_loss", -1, ".4g"),
    PasteColumn("To target", "rounds_to_target", -1, ".0f"),
    PasteColumn("Virtual s to target", "seconds_to_target", -1, ".4g"),
)


def paste_comparison(
    runs: Sequence[Run],
    rows: Sequence[ComparisonRow],
    target: float | None,
    tests: Sequence[PairedComparison],
    made_by: str = "",
) -> PasteTables:
    """A table for each federation; figures that a test found better or worse than the reference's are marked."""
    groups, tables = group_runs(runs), list[PasteTable]()
    row_of = {(row["federation"], row["label"]): row for row in rows}
    for its in by_federation(groups):
        federation = its[0].federation
        own = [test for test in tests if test.federation == federation]
        tables.append(federation_paste(its, [row_of[federation, g.label] for g in its], target, own))
    folders = [run.folder for run in runs if run.folder]
    made = [resume_command(run.folder, str(run.facts.get("engine"))) for run in runs if run.folder]
    return PasteTables(tables, [plain_row(row) for row in rows], [*made, made_by or command("compare", *folders)])


def federation_paste(
    groups: Sequence[RunGroup],
    rows: Sequence[ComparisonRow],
    target: float | None,
    tests: Sequence[PairedComparison],
) -> PasteTable:
    """The table of one federation."""
    verdicts = {(test.method, test.metric): test.verdict for test in tests}
    tested = {test.metric for test in tests}
    shown = [c for c in COLUMNS if is_shown(c, rows, tested)]
    body = [
        (row["label"], [paste_cell(column, g, row, rows, groups, verdicts) for column in shown])
        for g, row in zip(groups, rows, strict=True)
    ]
    notes = [comparison_remarks(rows, target), *mark_notes(verdicts.values(), tests[0].against if tests else "")]
    headings = ["Method", *(column.heading for column in shown)]
    return PasteTable(rows[0]["federation"], headings, body, [note for note in notes if note])


def is_shown(column: PasteColumn, rows: Sequence[ComparisonRow], tested: set[str]) -> bool:
    """Whether a column has a figure; the loss and the worst clients stand there if they are tested or alone."""
    if all(row[column.key] is None for row in rows):
        return False
    rare = column.key in ("worst_clients_accuracy", "test_loss")
    return not rare or column.key in tested or all(row["best_accuracy"] is None for row in rows)


def paste_cell(
    column: PasteColumn,
    group: RunGroup,
    row: ComparisonRow,
    rows: Sequence[ComparisonRow],
    groups: Sequence[RunGroup],
    verdicts: Mapping[tuple[str, str], str],
) -> PasteCell:
    """A figure of a group: bold where it is the best of its task and not all are."""
    value, std = row[column.key], row.get(f"{column.key}_std")
    if value is None:
        return PasteCell(None)
    peers = [other[column.key] for other, g in zip(rows, groups, strict=True) if g.task == group.task]
    known = [peer for peer in peers if peer is not None]
    best = min(known) < max(known) and value == (max if column.better > 0 else min)(known)
    mark = MARKS.get(verdicts.get((row["label"], column.key), ""), ("", ""))[0]
    spread = None if std is None else column.scale * std
    return PasteCell(column.scale * value, spread, column.form, best, mark)


def mark_notes(verdicts: Iterable[str], against: str, which: str = "seeds") -> list[str]:
    """What the marks mean that are in a table, and what was tested."""
    found = set(verdicts)
    if not found:
        return []
    from .significance import LEVEL  # loaded where tests were made

    words = [f"{mark} {word}" for verdict, (mark, word) in MARKS.items() if verdict in found]
    how = f"paired t-tests over {which}, p < {LEVEL:g}, corrected by Holm"
    return [
        f"{', '.join(words)} than {against}: {how}." if words else f"No difference from {against} is decided by {how}."
    ]


def plain_row(row: ComparisonRow) -> dict[str, Any]:
    """A row of figures for a CSV file; those of a test are columns of their own."""
    test = row.get("test") or {}
    flat: dict[str, Any] = {key: value for key, value in row.items() if key != "test"}
    for key, value in test.items():
        if key.endswith("interval"):
            flat |= {f"{key}_low": value and value[0], f"{key}_high": value and value[1]}
        elif key not in ("method", "federation", "missing", "refused"):
            flat[f"test_{key}"] = value
    return flat
