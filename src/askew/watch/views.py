"""What the page is sent of runs: rows of the table, curves, heat maps, and differences of configurations.

What is large is made small here: of curves the lowest and the highest points, of heat maps the shares of cells.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..experiment.roll_call import percent, reason_text
from ..report.tables import flatten_settings, participation_name, partition_name
from .columns import MISSING, REFUSED, USED, thin_out
from .folders import BROKEN, READING, WatchedRun

MOST_POINTS = 800  # of a curve
MOST_ROUNDS, MOST_CLIENTS = 400, 200  # cells of a heat map
MOST_CLASSES = 100
MOST_DOTS = 1000  # clients of which the share of turns is shown
MOST_SERIES = 60  # of one panel
FACTS = ("engine", "reason", "device", "kernels", "parameters", "version", "torch", "diverged", "remark")


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
    CurvePanel("by_class", "Accuracy by class, %", r"(class_accuracy|accuracy_(by_)?class(es)?)\..+", 100),
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


def client_count(run: WatchedRun) -> int:
    """The number of clients; where it was not recorded, as many as the highest number says."""
    known = int(run.federation.get("clients") or run.config.get("partition", {}).get("clients") or 0)
    return known or max(run.columns.clients, default=-1) + 1


def row(run: WatchedRun) -> dict[str, Any]:
    """The row of a run in the table."""
    base = {"id": run.number, "name": run.name, "state": run.state, "problem": run.problem}
    if run.state == READING or not run.config:
        return base
    config, columns = run.config, run.columns
    return base | {
        "method": str(config["algorithm"]["name"]),
        "data": str(config["data"]["name"]),
        "setting": f"{partition_name(config)}; {participation_name(config)}",
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


def panels(runs: Sequence[WatchedRun], over: str) -> list[dict[str, Any]]:
    """The curves of runs, panel by panel; only panels with something in them."""
    shown = []
    for panel in PANELS:
        series = []
        for run in runs:
            for key in [key for key in list(run.columns.numbers) if re.fullmatch(panel.keys, key)]:
                x, y = thin_out(*run.columns.points(key, over), MOST_POINTS)
                if x:
                    what = WORDS.get(key, key.partition(".")[2])
                    series.append({"run": run.number, "what": what, "x": x, "y": [panel.scale * v for v in y]})
        if series:
            whats = list(dict.fromkeys(one["what"] for one in series))
            left_out = max(0, len(series) - MOST_SERIES)
            shown.append(
                {
                    "name": panel.name,
                    "title": panel.title,
                    "whats": whats,
                    "series": series[:MOST_SERIES],
                    "left_out": left_out,
                }
            )
    return shown


# clients ----------------------------------------------------------------------------------------------------------


def turns(run: WatchedRun, window: Sequence[int]) -> dict[str, Any]:
    """Clients by rounds in a window (first and last round, first and last client): in each cell the shares of turns
    that were used, of answers that did not come, and of answers that were refused, as bytes from 0 to 255.
    """
    import numpy as np  # here, since the page is there before it is loaded

    clients, count = client_count(run), run.columns.count
    if not count or not clients:
        return {"rounds": count, "clients": clients, "cells": ""}
    first, last = clip_span(window[:2], 1, count)
    low, high = clip_span(window[2:], 0, clients - 1)
    asked, fates, ends = run.columns.asked(first, last)
    bounds = np.frombuffer(ends, np.uint64).astype(np.int64)
    width, height = min(MOST_ROUNDS, last - first + 1), min(MOST_CLIENTS, high - low + 1)
    columns, rows = cells_of(last - first + 1, width), cells_of(high - low + 1, height)
    # each turn is a number: its row, its column and its fate, looked up in small tables, as there may be millions
    outside = width * height * 4
    who = np.frombuffer(asked, np.uint32)
    starts = np.full(max(clients, int(who.max(initial=0)) + 1), outside, np.int32)
    starts[low : high + 1] = rows * width * 4
    turn = starts[who]
    turn += np.repeat(columns * 4, bounds[1:] - bounds[:-1])
    turn += np.frombuffer(fates, np.uint8)
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
        "cells": base64.b64encode(cells.tobytes()).decode(),
    }


def cells_of(count: int, cells: int) -> Any:
    """The cell of each of so many rounds or clients, in an array."""
    import numpy as np

    return (np.arange(count) * cells // count).astype(np.int32)


def clip_span(span: Sequence[int], least: int, most: int) -> tuple[int, int]:
    """The first and the last of a span inside of another one; both ends 0 or in the wrong order: all of it."""
    low, high = max(least, span[0]), min(most, span[1])
    return (low, high) if low <= high and any(span) else (least, most)


def shares(run: WatchedRun) -> dict[str, Any]:
    """Each client's share of all data and of all turns, in percent, by data; and in a sentence who took none."""
    import numpy as np

    sizes = np.asarray(run.federation.get("sizes") or [], dtype=float)
    if not run.columns.count or not sizes.sum():
        return {"x": [], "y": [], "note": ""}
    asked, fates, _ = run.columns.asked(1, run.columns.count)
    used = np.frombuffer(asked, np.uint32)[np.frombuffer(fates, np.uint8) == USED]
    counts = np.bincount(used, minlength=len(sizes))[: len(sizes)]
    data, taken = 100 * sizes / sizes.sum(), 100 * counts / max(1, counts.sum())
    order = np.argsort(data, kind="stable")
    order = order[np.unique(np.linspace(0, len(order) - 1, min(MOST_DOTS, len(order))).astype(int))]
    never = counts == 0
    held = percent(float(data[never].sum() / 100))
    some = f"{int(never.sum())} of {len(sizes)} clients took no turn so far; they hold {held} of the data."
    note = some if never.any() else "Every client has taken a turn."
    return {"x": data[order].tolist(), "y": taken[order].tolist(), "clients": order.tolist(), "note": note}


def classes(run: WatchedRun) -> dict[str, Any]:
    """Samples by class and client: of many clients or classes, the mean of those that share a cell."""
    import numpy as np

    labels = run.federation.get("labels") or []
    if not labels or len({len(each) for each in labels}) != 1:
        return {"clients": 0, "classes": 0, "values": []}
    table = np.asarray(labels, dtype=float)
    for axis, most in ((0, MOST_ROUNDS), (1, MOST_CLASSES)):
        if table.shape[axis] > most:
            starts = np.arange(most) * table.shape[axis] // most
            widths = np.diff(np.append(starts, table.shape[axis]))
            table = np.add.reduceat(table, starts, axis) / (widths[:, None] if axis == 0 else widths)
    names = run.federation.get("class_names") or []
    return {
        "clients": len(labels),
        "classes": len(labels[0]),
        "names": [str(name) for name in names[:MOST_CLASSES]],
        "width": table.shape[0],
        "height": table.shape[1],
        "values": table.T.round(2).ravel().tolist(),
    }


# one run and several ------------------------------------------------------------------------------------------------


def details(run: WatchedRun) -> dict[str, Any]:
    """Facts about a run and its incidents, the last ones first."""
    columns = run.columns
    with columns.lock:
        reasons = [reason_text(reason, clients) for reason, clients in columns.reasons.items()]
        incidents = list(columns.incidents)
    facts = {key: str(run.facts[key]) for key in FACTS if run.facts.get(key) not in (None, "")}
    return {"facts": facts, "reasons": reasons, "incidents": incidents[::-1]}


def differences(runs: Sequence[WatchedRun]) -> list[dict[str, Any]]:
    """The settings in which runs differ, with the value of each run."""
    flat = [
        {"seed": str(run.config.get("seed"))} | flatten_settings(run.config)
        for run in runs
        if run.config and run.state != BROKEN
    ]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [{"key": key, "values": [settings.get(key, "–") for settings in flat]} for key in keys]
    return [each for each in rows if len(set(each["values"])) > 1]
