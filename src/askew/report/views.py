"""What the page shows of runs: rows of the table, curves, heat maps and facts.

`askew watch` sends it to the page, and `askew report` stores it in the page. What is large is made small here: of
curves the lowest and the highest points, of heat maps the shares of cells.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.text import count_text
from ..experiment.roll_call import percent, reason_text
from ..experiment.store import DIVERGED, Run
from .columns import MISSING, REFUSED, USED, Columns, thin_out
from .tables import flatten_settings, has_diverged, participation_name, partition_name

MOST_DOTS = 1000  # clients of which the share of turns is shown
MOST_SERIES = 60  # curves of one run in one picture
MOST_CHOSEN = 12  # runs in one picture
BROKEN, READING = "broken", "being read"  # states of a folder, beside those of a run
CLASS_ACCURACY = "class_accuracy"  # the table of a record with the accuracy of each class
FACTS = ("engine", "reason", "device", "kernels", "parameters", "version", "torch", "diverged", "remark")


Answer = dict[str, Any]  # as JSON holds it


class Detail(NamedTuple):
    """How much of a run is shown at once."""

    points: int = 800  # of a curve
    rounds: int = 400  # cells of a heat map
    clients: int = 200
    classes: int = 100


FULL = Detail()


class CurvePanel(NamedTuple):
    """A picture with curves: `keys` is a pattern of the record keys in it."""

    name: str
    title: str
    keys: str
    scale: float = 1.0


PANELS = (
    CurvePanel("accuracy", "Test accuracy, %", "accuracy", 100),
    CurvePanel("loss", "Test loss", "loss"),
    CurvePanel("train_loss", "Training loss", "train_loss"),
    CurvePanel("held_out", "Accuracy on held-out samples, %", "accuracy_validation", 100),
    CurvePanel("clients", "Accuracy on clients' own samples, %", r"client_accuracy_(worst10|mean|best10)", 100),
    CurvePanel("rare", "Accuracy on rare and common classes, %", r"accuracy_(rare|common)", 100),
    CurvePanel("norms", "Drift: lengths of updates", r"drift_(norm|norm_global|spread)"),
    CurvePanel("cosines", "Drift: cosines", r"drift_(cosine_mean|previous_mean|turn)"),
    CurvePanel("diversity", "Drift: diversity of updates", "drift_diversity"),
    CurvePanel("layers", "Drift by layer: diversity", r"drift_layers\..+"),
    CurvePanel("relative_layers", "Drift by layer: spread relative to the mean", r"drift_relative_layers\..+"),
    CurvePanel("epsilon", "Privacy: ε so far", "epsilon"),
)
# Words for record keys, where a panel shows several.
WORDS = {
    "client_accuracy_worst10": "worst tenth",
    "client_accuracy_mean": "mean",
    "client_accuracy_best10": "best tenth",
    "accuracy_rare": "rare",
    "accuracy_common": "common",
    "drift_norm": "mean ‖δ‖",
    "drift_norm_global": "‖Δ‖",
    "drift_spread": "spread",
    "drift_cosine_mean": "update and global update",
    "drift_previous_mean": "update and global update before",
    "drift_turn": "global update and the one before",
}


class ShownRun:
    """A run as the page shows it. `problem` says why its folder cannot be read."""

    def __init__(self, number: int, name: str, state: str = READING, problem: str = "") -> None:
        self.number, self.name, self.state, self.problem = number, name, state, problem
        self.config: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.federation: dict[str, Any] = {}
        self.columns = Columns()
        self.begun = 0.0
        self.label = ""  # its method and the settings that distinguish it, where they are known

    def show(self, run: Run, columns: Columns) -> None:
        """Show this run, whose records are in these columns."""
        self.config, self.facts, self.federation, self.columns = run.config, run.facts, run.federation, columns
        self.state = str(run.facts.get("state") or ("finished" if run.finished else "interrupted"))
        if self.state == "finished" and has_diverged(run):  # it went on to its last round, but is no result
            self.state = DIVERGED
        self.begun, self.problem = (run.folder / "run.toml").stat().st_mtime if run.folder else 0.0, ""


def shown_columns(run: Run) -> Columns:
    """The columns of a run; an error where what is shown of it cannot be shown."""
    columns = Columns(run.rounds)
    for table in ("data", "partition", "participation"):
        dict(run.config[table])
    sizes, labels = run.federation.get("sizes") or [], run.federation.get("labels") or []
    sum(sizes), int(run.federation.get("clients") or 0), [sum(row) for row in labels]
    return columns


def client_count(run: ShownRun) -> int:
    """The number of clients; where it was not recorded, as many as the highest number says."""
    known = int(run.federation.get("clients") or run.config.get("partition", {}).get("clients") or 0)
    return known or max(run.columns.clients, default=-1) + 1


def table(runs: Sequence[ShownRun]) -> Answer:
    """The rows of all runs, and the titles of the pictures by their names."""
    titles = {panel.name: panel.title for panel in PANELS}
    return {"most": MOST_CHOSEN, "panels": titles, "rows": [row(run) for run in runs]}


def row(run: ShownRun) -> Answer:
    """The row of a run in the table."""
    base = {"id": run.number, "name": run.name, "state": run.state, "problem": run.problem}
    if run.state == READING or not run.config:
        return base
    config, columns, method = run.config, run.columns, str(run.config["algorithm"]["name"])
    own = run.label.removeprefix(method).strip()
    return base | {
        "label": run.label,
        "method": method,
        "data": str(config["data"]["name"]),
        "setting": "; ".join(filter(None, [own, partition_name(config), participation_name(config)])),
        "seed": config.get("seed"),
        "clients": client_count(run),
        "round": columns.count,
        "rounds": config["rounds"],
        "accuracy": columns.last("accuracy"),
        "best": columns.best,
        "loss": columns.last("loss"),
        "bytes": columns.totals["bytes"],
        "seconds": columns.totals["seconds"],
        "begun": run.begun,
    }


def curves(run: ShownRun, detail: Detail = FULL) -> Answer:
    """The curves of a run: points have places in `round`, `bytes` and `seconds`, these two summed so far, and `clock`.

    With them its settings and its last accuracy by class, in which chosen runs are compared.
    """
    columns, series, counts = run.columns, list[dict[str, Any]](), dict[str, int]()
    for panel in PANELS:
        for key in [key for key in list(columns.numbers) if re.fullmatch(panel.keys, key)]:
            rounds, values = columns.points(key)
            counts[panel.name] = counts.get(panel.name, 0) + bool(rounds)
            if rounds and counts[panel.name] <= MOST_SERIES:
                kept = thin_out(values, detail.points)
                what = WORDS.get(key, key.partition(".")[2])
                y = [short(panel.scale * values[place]) for place in kept]
                series.append({"panel": panel.name, "what": what, "at": [rounds[place] for place in kept], "y": y})
    shown = sorted({round for each in series for round in each["at"]})
    places = {round: place for place, round in enumerate(shown)}
    for each in series:
        each["at"] = None if each["at"] == shown else [places[round] for round in each["at"]]
    sent, seconds = columns.so_far("bytes_up", "bytes_down"), columns.so_far("seconds")
    clock = dict(zip(*columns.points("clock"), strict=True))  # none without virtual time
    return {
        "round": shown,
        "bytes": [sent[round - 1] for round in shown],
        "seconds": [short(seconds[round - 1]) for round in shown],
        "clock": [clock.get(round) for round in shown] if clock else [],
        "series": series,
        "left_out": {name: count - MOST_SERIES for name, count in counts.items() if count > MOST_SERIES},
        "settings": {"seed": str(run.config.get("seed"))} | flatten_settings(run.config) if run.config else {},
        "by_class": {class_name(run, key): columns.last(key) for key in class_keys(run)[: detail.classes]},
    }


def short(value: float) -> float:
    """A number with six digits, which are more than a picture shows."""
    return float(f"{value:.6g}")


def class_keys(run: ShownRun) -> list[str]:
    """The columns with the accuracy of each class, in the order of the classes' numbers."""
    keys = [key for key in list(run.columns.numbers) if key.startswith(f"{CLASS_ACCURACY}.")]
    return sorted(keys, key=lambda key: (len(key), key) if key.partition(".")[2].isdigit() else (0, ""))


def class_name(run: ShownRun, key: str) -> str:
    """The name of the class whose accuracy is in a column; its number where it has none."""
    number, names = key.partition(".")[2], run.federation.get("class_names") or []
    return str(names[int(number)]) if number.isdigit() and int(number) < len(names) else number


# clients and classes of one run -------------------------------------------------------------------------------------


def clients(run: ShownRun, detail: Detail = FULL) -> Answer:
    """What is shown of one run beside its curves."""
    return {
        "shares": shares(run),
        "classes": classes(run, detail),
        "by_class": accuracy_by_class(run, detail),
        **details(run),
    }


def turns(run: ShownRun, window: Sequence[int] = (0, 0, 0, 0), detail: Detail = FULL) -> Answer:
    """Clients by rounds in a window (first and last round, first and last client): in each cell the shares of turns
    that were used, of answers that did not come, and of answers that were refused, as bytes from 0 to 255.
    """
    import numpy as np  # here, since the page is there before it is loaded

    clients, count = client_count(run), run.columns.count
    if not count or not clients:
        return {"rounds": count, "clients": clients, "cells": ""}
    first, last = clip_span(window[:2], 1, count)
    low, high = clip_span(window[2:], 0, clients - 1)
    asked, outcomes, ends = run.columns.asked(first, last)
    bounds = np.frombuffer(ends, np.uint64).astype(np.int64)
    width, height = min(detail.rounds, last - first + 1), min(detail.clients, high - low + 1)
    columns, rows = cells_of(last - first + 1, width), cells_of(high - low + 1, height)
    # each turn is a number: its row, its column and its outcome, looked up in small tables, as there may be millions
    outside = width * height * 4
    who = np.frombuffer(asked, np.uint32)
    starts = np.full(max(clients, int(who.max(initial=0)) + 1), outside, np.int32)
    starts[low : high + 1] = rows * width * 4
    turn = starts[who]
    turn += np.repeat(columns * 4, bounds[1:] - bounds[:-1])
    turn += np.frombuffer(outcomes, np.uint8)
    counts = np.bincount(turn, minlength=outside)[:outside].reshape(height * width, 4).T
    room = np.outer(np.bincount(rows), np.bincount(columns)).ravel()
    shares = counts[[USED, MISSING, REFUSED]] / room
    cells = np.ceil(255 * shares).clip(0, 255).astype(np.uint8)  # upwards: a single one is seen
    return {
        "rounds": count,
        "clients": clients,
        "window": [first, last, low, high],
        "width": width,
        "height": height,
        "cells": as_text(cells),
    }


def as_text(cells: Any) -> str:
    """An array of bytes as text."""
    return base64.b64encode(cells.tobytes()).decode()


def cells_of(count: int, cells: int) -> Any:
    """The cell of each of so many rounds or clients, in an array."""
    import numpy as np

    return (np.arange(count) * cells // count).astype(np.int32)


def clip_span(span: Sequence[int], least: int, most: int) -> tuple[int, int]:
    """The first and the last of a span inside of another one; both ends 0 or in the wrong order: all of it."""
    low, high = max(least, span[0]), min(most, span[1])
    return (low, high) if low <= high and any(span) else (least, most)


def shares(run: ShownRun) -> Answer:
    """Each client's share of all data and of all turns, in percent, by data; and in a sentence who took none."""
    import numpy as np

    sizes = np.asarray(run.federation.get("sizes") or [], dtype=float)
    if not run.columns.count or not sizes.sum():
        return {"x": [], "y": [], "note": ""}
    asked, outcomes, _ = run.columns.asked(1, run.columns.count)
    used = np.frombuffer(asked, np.uint32)[np.frombuffer(outcomes, np.uint8) == USED]
    counts = np.bincount(used, minlength=len(sizes))[: len(sizes)]
    data, taken = 100 * sizes / sizes.sum(), 100 * counts / max(1, counts.sum())
    order = np.argsort(data, kind="stable")
    order = order[np.unique(np.linspace(0, len(order) - 1, min(MOST_DOTS, len(order))).astype(int))]
    note = turns_note(counts, sizes, run.facts.get("engine") == "flower")
    return {"x": data[order].tolist(), "y": taken[order].tolist(), "clients": order.tolist(), "note": note}


def turns_note(counts: Any, sizes: Any, deployed: bool) -> str:
    """Who took no turn, and what they hold; in a deployment the sizes of those who never came are 0, and not known."""
    never = counts == 0
    number, unknown = int(never.sum()), int((never & (sizes == 0)).sum()) if deployed else 0
    if not number:
        return "Every client has taken a turn."
    who, share = "it holds" if number == 1 else "they hold", percent(float(sizes[never].sum() / sizes.sum()))
    held = f"{who} {share} of the data"
    if unknown:
        others = f"{held}, and of {count_text(unknown, 'client')} that is not known"
        held = f"what {who} is not known" if unknown == number else others
    return f"{number} of {count_text(len(sizes), 'client')} took no turn so far; {held}."


def classes(run: ShownRun, detail: Detail = FULL) -> Answer:
    """Samples by class and client: of many clients or classes, the mean of those that share a cell."""
    import numpy as np

    labels = run.federation.get("labels") or []
    if not labels or len({len(each) for each in labels}) != 1:
        return {"clients": 0, "classes": 0, "values": []}
    counts = merge_cells(merge_cells(np.asarray(labels, dtype=float), 0, detail.rounds), 1, detail.classes)
    names = run.federation.get("class_names") or []
    return {
        "clients": len(labels),
        "classes": len(labels[0]),
        "names": [str(name) for name in names[: detail.classes]],
        "width": counts.shape[0],
        "height": counts.shape[1],
        "values": counts.T.round(2).ravel().tolist(),
    }


def accuracy_by_class(run: ShownRun, detail: Detail = FULL) -> Answer:
    """Accuracy by class and evaluated round, as bytes from 1 to 255, 0 where there is none; of many rounds or classes,
    the mean of those that share a cell.
    """
    import numpy as np

    columns, keys = run.columns, class_keys(run)
    rounds = sorted({round for key in keys for round in columns.points(key)[0]})
    if not rounds:
        return {"classes": 0, "cells": ""}
    values = np.full((len(rounds), len(keys)), np.nan)
    for k, key in enumerate(keys):
        at, found = columns.points(key)
        values[np.searchsorted(rounds, at), k] = found
    known = np.isfinite(values)
    sums, counts = (
        merge_cells(merge_cells(each.astype(float), 0, detail.rounds), 1, detail.classes)
        for each in (np.where(known, values, 0), known)
    )
    mean = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    cells = np.where(counts > 0, 1 + np.rint(254 * mean.clip(0, 1)), 0).astype(np.uint8)
    starts = np.arange(len(mean)) * len(rounds) // len(mean)
    return {
        "classes": len(keys),
        "names": [class_name(run, key) for key in keys[: detail.classes]],
        "rounds": [rounds[start] for start in starts],
        "cells": as_text(np.ascontiguousarray(cells.T)),
    }


def merge_cells(values: Any, axis: int, most: int) -> Any:
    """A table with at most so many cells along an axis, each the mean of those that share it."""
    import numpy as np

    count = values.shape[axis]
    if count <= most:
        return values
    starts = np.arange(most) * count // most
    widths = np.diff(np.append(starts, count))
    return np.add.reduceat(values, starts, axis) / (widths[:, None] if axis == 0 else widths)


def details(run: ShownRun) -> Answer:
    """Facts about a run and its incidents, the last ones first."""
    columns = run.columns
    with columns.lock:
        reasons = [reason_text(reason, clients) for reason, clients in columns.reasons.items()]
        incidents = list(columns.incidents)
    facts = {key: str(run.facts[key]) for key in FACTS if run.facts.get(key) not in (None, "")}
    return {"facts": facts, "reasons": reasons, "incidents": incidents[::-1]}
