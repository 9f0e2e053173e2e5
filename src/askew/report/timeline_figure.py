"""The picture of a timeline: who computed when, who was late, and when rounds ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.records import LATE, LEFT, NO_ANSWER, NOT_AWAITED, Record
from ..experiment.roll_call import call_round
from ..experiment.store import Run
from .picture import BLUE, COLOURS, GREY, INK, ORANGE, WIDTH, Picture, canvas, draw_legend
from .tables import RunGroup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROUNDS, MOST_CLIENTS = 8, 40  # that the picture shows
NARROW = 0.03  # of the picture's width: the least distance of two numbers of rounds
GREEN, PALE = COLOURS[2], COLOURS[5]
LABELS = {BLUE: "answer counts", ORANGE: "late or not awaited", GREY: "left or no answer"}
# where answers may be used in later rounds
OVERLAPPING_LABELS = {
    BLUE: "answer from the newest model",
    GREEN: "from an older model; number: staleness",
    PALE: "not used yet",
    GREY: "left, or not used",
}
AT_WORK = "at work"  # in the last round that is shown
NOT_USED = "not used"  # why an answer does not count that came


class Bar(NamedTuple):
    """What one client did for one answer."""

    client: int
    start: float
    seconds: float  # until its answer came, or it left
    end: float  # of the round, if the answer is then late
    reason: str  # why its answer does not count; empty: it does
    staleness: int = 0

    @property
    def colour(self) -> str:
        if not self.reason:
            return GREEN if self.staleness else BLUE
        return {LATE: ORANGE, NOT_AWAITED: ORANGE, AT_WORK: PALE}.get(self.reason, GREY)


def bars_of(record: Record) -> list[Bar]:
    """A bar for each client that was asked in a round."""
    call, began, end = call_round(record), float(record["began"]), float(record["clock"])
    dropped = (LATE, NOT_AWAITED, LEFT, NO_ANSWER)  # what became of a good answer is not a matter of time
    reasons = {client: reason for reason in dropped for client in call.incidents.get(reason, ())}
    pairs = zip(call.asked, record["answer_seconds"], strict=True)
    return [Bar(client, began, float(seconds), end, reasons.get(client, "")) for client, seconds in pairs]


def overlapping_bars(records: Sequence[Record]) -> list[Bar]:
    """A bar for each client that began, where its answer may be used in a later round."""
    at_work, bars = dict[int, Bar](), list[Bar]()
    for record in records:
        for client, start, seconds in zip(
            record["started"], record["started_at"], record["answer_seconds"], strict=True
        ):
            at_work[client] = Bar(client, float(start), float(seconds), float(start) + float(seconds), AT_WORK)
        call = call_round(record)
        staleness = dict(zip(record["participants"], record["staleness"], strict=True))
        for client in call.asked:
            if bar := at_work.pop(client, None):
                reason = "" if client in call.used else NOT_USED
                bars.append(bar._replace(reason=reason, staleness=staleness.get(client, 0)))
    return [*bars, *at_work.values()]


def timeline_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """The first rounds of a run with a clock as a Gantt chart: a row for each client, a bar for each answer."""
    clocked = [run for g in groups for run in g.runs if run.clock is not None]
    if not clocked:
        return None
    run = clocked[0]
    records = run.rounds[:MOST_ROUNDS]
    overlapping = "started" in records[0]
    bars = overlapping_bars(records) if overlapping else [bar for record in records for bar in bars_of(record)]
    labels = OVERLAPPING_LABELS if overlapping else LABELS
    shown = sorted({bar.client for bar in bars})[:MOST_CLIENTS]
    rows = {client: row for row, client in enumerate(shown)}
    figure = canvas(WIDTH, 1.6 + 0.19 * max(6, len(shown)))
    axes = figure.add_subplot(xlabel="Virtual clock, seconds", ylabel="Client")
    draw_rounds(axes, records, overlapping)
    colours = draw_bars(axes, [bar for bar in bars if bar.client in rows], rows, labels)
    axes.set_yticks(range(len(shown)), [str(client) for client in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * float(records[-1]["clock"]) or 1.0)
    axes.grid(visible=False, axis="y")
    draw_legend(figure, list(colours.values()), [labels[colour] for colour in colours])
    note = timeline_note(run, groups, records, len({bar.client for bar in bars}) - len(shown))
    counts = ", ".join(f"{sum(bar.colour == colour for bar in bars)} {text}" for colour, text in labels.items())
    alt = f"Gantt chart of clients over the virtual clock, {len(records)} rounds. Bars: {counts}."
    return Picture("timeline", "Timeline", alt, note, figure)


def draw_bars(axes: Axes, bars: Sequence[Bar], rows: dict[int, int], labels: Iterable[str]) -> dict[str, Any]:
    """Draw the bars, the part after the round's end pale; returns a handle for each colour that is there."""
    handles: dict[str, Any] = {}
    for colour in labels:
        own = [bar for bar in bars if bar.colour == colour]
        if not own:
            continue
        places = [rows[bar.client] for bar in own]
        inside = [min(bar.seconds, bar.end - bar.start) for bar in own]
        starts = [bar.start for bar in own]
        handles[colour] = axes.barh(
            places, inside, left=starts, height=0.62, color=colour, edgecolor=colour, linewidth=0.6, zorder=3
        )
        over = [bar.seconds - length for bar, length in zip(own, inside, strict=True)]
        ends = [bar.start + length for bar, length in zip(own, inside, strict=True)]
        axes.barh(places, over, left=ends, height=0.2, color=colour, alpha=0.35, zorder=2)
        if colour == GREY:
            axes.plot(ends, places, "x", color=INK, markersize=5, zorder=4)
    for bar in bars:
        if bar.staleness:
            place: Any = (bar.start + bar.seconds, rows[bar.client])
            shift: Any = (-1.5, 0)
            axes.annotate(
                str(bar.staleness),
                place,
                shift,
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=7.5,
                color="white",
                zorder=5,
                annotation_clip=True,
            )
    return handles


def draw_rounds(axes: Axes, records: Sequence[Record], overlapping: bool) -> None:
    """Draw where rounds end, their numbers, and where the clock went on because nobody was there."""
    before, numbered = 0.0, -math.inf
    narrow = NARROW * float(records[-1]["clock"])
    for record in records:
        began, end = float(record["began"]), float(record["clock"])
        if began > before:
            axes.axvspan(before, began, color=GREY, alpha=0.2, linewidth=0, zorder=0.5)
        axes.axvline(end, color=INK, linewidth=1, linestyle="--", zorder=4)
        place: Any = (end if overlapping else (began + end) / 2, 1.01)
        first = f"{'step' if overlapping else 'round'} {record['round']}"
        if place[0] - numbered > narrow:
            text = first if record["round"] == 1 else str(record["round"])
            axes.annotate(text, place, xycoords=("data", "axes fraction"), ha="center", fontsize=9)
            numbered = place[0]
        before = end


def timeline_note(run: Run, groups: Sequence[RunGroup], records: Sequence[Record], left_out: int) -> str:
    """What the picture shows, and of what."""
    ends = {
        "deadline": "its deadline or last answer",
        "first": "the last answer that is wanted",
        "buffer": "the server's step with the answers that have come",
    }
    wait = str(run.config.get("time", {}).get("wait"))
    end = ends.get(wait, "its last answer")
    note = f"Rounds 1 to {len(records)} of {run.algorithm}; dashed: the end of a round, which is {end}."
    note += " Pale: what was still missing of a late answer." if wait != "all" and "started" not in records[0] else ""
    note += " Cross: the client left." if any(record["away"] for record in records) else ""
    before = [0.0, *(float(record["clock"]) for record in records)]
    waited = any(float(record["began"]) > clock for record, clock in zip(records, before, strict=False))
    note += " Grey background: nobody was there." if waited else ""
    note += f" {left_out} more clients were asked." if left_out else ""
    several = len(groups) > 1 or len(groups[0].runs) > 1
    return note + (" One run is shown." if several else "")
