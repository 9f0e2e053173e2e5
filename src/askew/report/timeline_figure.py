"""The picture of a timeline: who computed when, who was late, and when rounds ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.records import LATE, LEFT, NO_ANSWER, NOT_AWAITED
from ..experiment.roll_call import call_round
from ..experiment.store import Record, Run
from .picture import BLUE, GREY, INK, ORANGE, WIDTH, Picture, canvas, draw_legend
from .tables import RunGroup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROUNDS, MOST_CLIENTS = 8, 40  # that the picture shows
LABELS = {BLUE: "answer counts", ORANGE: "late or not awaited", GREY: "left or no answer"}


class Bar(NamedTuple):
    """What one client did in one round."""

    client: int
    start: float
    seconds: float  # until its answer came, or it left
    end: float  # of the round
    reason: str  # why its answer does not count; empty: it does

    @property
    def colour(self) -> str:
        if not self.reason:
            return BLUE
        return ORANGE if self.reason in (LATE, NOT_AWAITED) else GREY


def bars_of(record: Record) -> list[Bar]:
    """A bar for each client that was asked in a round."""
    call, began, end = call_round(record), float(record["began"]), float(record["clock"])
    dropped = (LATE, NOT_AWAITED, LEFT, NO_ANSWER)  # what became of a good answer is not a matter of time
    reasons = {client: reason for reason in dropped for client in call.incidents.get(reason, ())}
    pairs = zip(call.asked, record["answer_seconds"], strict=True)
    return [Bar(client, began, float(seconds), end, reasons.get(client, "")) for client, seconds in pairs]


def timeline_picture(groups: Sequence[RunGroup]) -> Picture | None:
    """The first rounds of a run with a clock as a Gantt chart: a row for each client, a bar for each answer."""
    clocked = [run for g in groups for run in g.runs if run.clock is not None]
    if not clocked:
        return None
    run = clocked[0]
    records = run.rounds[:MOST_ROUNDS]
    bars = [bar for record in records for bar in bars_of(record)]
    shown = sorted({bar.client for bar in bars})[:MOST_CLIENTS]
    rows = {client: row for row, client in enumerate(shown)}
    figure = canvas(WIDTH, 1.6 + 0.19 * max(6, len(shown)))
    axes = figure.add_subplot(xlabel="Virtual clock, seconds", ylabel="Client")
    draw_rounds(axes, records)
    colours = draw_bars(axes, [bar for bar in bars if bar.client in rows], rows)
    axes.set_yticks(range(len(shown)), [str(client) for client in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * float(records[-1]["clock"]) or 1.0)
    axes.grid(visible=False, axis="y")
    draw_legend(figure, list(colours.values()), [LABELS[colour] for colour in colours])
    note = timeline_note(run, groups, records, len({bar.client for bar in bars}) - len(shown))
    counts = ", ".join(f"{sum(bar.colour == colour for bar in bars)} {text}" for colour, text in LABELS.items())
    alt = f"Gantt chart of clients over the virtual clock, {len(records)} rounds. Bars: {counts}."
    return Picture("timeline", "Timeline", alt, note, figure)


def draw_bars(axes: Axes, bars: Sequence[Bar], rows: dict[int, int]) -> dict[str, Any]:
    """Draw the bars, the part after the round's end pale; returns a handle for each colour that is there."""
    handles: dict[str, Any] = {}
    for colour in LABELS:
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
    return handles


def draw_rounds(axes: Axes, records: Sequence[Record]) -> None:
    """Draw where rounds end, their numbers, and where the clock went on because nobody was there."""
    before = 0.0
    for record in records:
        began, end = float(record["began"]), float(record["clock"])
        if began > before:
            axes.axvspan(before, began, color=GREY, alpha=0.2, linewidth=0, zorder=0.5)
        axes.axvline(end, color=INK, linewidth=1, linestyle="--", zorder=4)
        place: Any = ((began + end) / 2, 1.01)
        text = f"round {record['round']}" if record["round"] == 1 else str(record["round"])
        axes.annotate(text, place, xycoords=("data", "axes fraction"), ha="center", fontsize=9)
        before = end


def timeline_note(run: Run, groups: Sequence[RunGroup], records: Sequence[Record], left_out: int) -> str:
    """What the picture shows, and of what."""
    ends = {"deadline": "its deadline or last answer", "first": "the last answer that is wanted"}
    wait = str(run.config.get("time", {}).get("wait"))
    end = ends.get(wait, "its last answer")
    note = f"Rounds 1 to {len(records)} of {run.algorithm}; dashed: the end of a round, which is {end}."
    note += " Pale: what was still missing of a late answer." if wait != "all" else ""
    note += " Cross: the client left." if any(record["away"] for record in records) else ""
    before = [0.0, *(float(record["clock"]) for record in records)]
    waited = any(float(record["began"]) > clock for record, clock in zip(records, before, strict=False))
    note += " Grey background: nobody was there." if waited else ""
    note += f" {left_out} more clients were asked." if left_out else ""
    several = len(groups) > 1 or len(groups[0].runs) > 1
    return note + (" One run is shown." if several else "")
