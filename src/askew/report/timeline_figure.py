"""The picture of a timeline: who computed when, who was late, and when rounds ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.records import LATE, LEFT, NO_ANSWER, NOT_AWAITED, Record
from ..core.text import count_text
from ..experiment.roll_call import call_round
from ..experiment.store import Run
from .picture import BLUE, COLOURS, GREY, INK, ORANGE, WIDTH, Picture, canvas, draw_legend
from .tables import RunGroup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROUNDS, MOST_CLIENTS = 8, 40  # that the picture shows
NARROW = 0.03  # of the picture's width: the least distance of two numbers of rounds
ROUNDED = 1e-9  # of the picture's width: a gap that is due to rounding
DIGIT = 0.012  # of the picture's width: a digit of a staleness
INSIDE = 0.012  # of the picture's width: how far within its round a mark is drawn
GREEN, PALE = COLOURS[2], COLOURS[5]
IN_TIME = "answer in time"
# where answers may be used in later rounds
NEWEST, OLDER = "answer from the newest model", "from an older model; number: staleness"
AT_WORK = "at work, or not used yet"  # in the last round that is shown
NOT_USED = "answer not used"
DROPPED_OUT = "dropped out, no answer"
# What became of an answer, as the legend says it: for lost ones as in the records.
OUTCOMES = {
    IN_TIME: BLUE,
    NEWEST: BLUE,
    OLDER: GREEN,
    LATE: ORANGE,
    NOT_AWAITED: ORANGE,
    AT_WORK: PALE,
    NOT_USED: GREY,
    LEFT: GREY,
    DROPPED_OUT: "",  # there is no bar
}
MARKS = {LEFT: "x", DROPPED_OUT: "o"}


class Bar(NamedTuple):
    """What one client did for one answer."""

    client: int
    start: float
    seconds: float  # until its answer came, or it left
    end: float  # of the round, if the answer is then late
    outcome: str
    staleness: int = 0

    @property
    def worked(self) -> float:
        """The seconds for which the client was at work: it stops when the round ends."""
        return min(self.seconds, self.end - self.start)

    def mark(self, inside: float) -> float:
        """Where it is marked that the client left, or that it dropped out: so far within its bar, or its round."""
        if self.outcome == DROPPED_OUT:
            return self.start + min(inside, (self.end - self.start) / 2)
        return self.start + max(self.worked - inside, self.worked / 2)


def bars_of(record: Record) -> list[Bar]:
    """A bar for each client that was asked in a round."""
    call, began, end = call_round(record), float(record["began"]), float(record["clock"])
    outcomes = dict.fromkeys(call.asked, NOT_USED) | dict.fromkeys(call.used, IN_TIME)
    outcomes |= {client: reason for reason in (LATE, NOT_AWAITED, LEFT) for client in call.incidents.get(reason, ())}
    pairs = zip(call.asked, map(float, record["answer_seconds"]), strict=True)
    bars = [Bar(client, began, seconds, end, outcomes[client]) for client, seconds in pairs]
    absent = call.incidents.get(NO_ANSWER, ())
    return [bar._replace(outcome=DROPPED_OUT) if bar.client in absent and not bar.seconds else bar for bar in bars]


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
                stale = staleness.get(client, 0)
                outcome = OLDER if stale else NEWEST
                if client not in call.used:
                    outcome = LEFT if client in call.incidents.get(LEFT, ()) else NOT_USED
                bars.append(bar._replace(outcome=outcome, staleness=stale))
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
    asked = sorted({bar.client for bar in bars})
    rows = {client: row for row, client in enumerate(asked[:MOST_CLIENTS])}
    figure = canvas(WIDTH, 2.0 + 0.19 * max(6, len(rows)))
    axes = figure.add_subplot(xlabel="Virtual clock, seconds", ylabel="Client")
    axes.set_yticks(range(len(rows)), [str(client) for client in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * float(records[-1]["clock"]) or 1.0)
    axes.grid(visible=False, axis="y")
    handles = draw_bars(axes, [bar for bar in bars if bar.client in rows], rows)
    handles |= draw_rounds(axes, records, run.config["time"]) | draw_gaps(axes, bars, float(records[-1]["clock"]))
    draw_legend(figure, list(handles.values()), list(handles))
    counts = Counter(bar.outcome for bar in bars)
    words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    alt = f"Gantt chart of clients over the virtual clock, {count_text(len(records), 'round')}. Bars: {words}."
    return Picture("timeline", "Timeline", alt, timeline_note(run, groups, records, len(asked)), figure)


def draw_bars(axes: Axes, bars: Sequence[Bar], rows: dict[int, int]) -> dict[str, Any]:
    """Draw the bars, and thin what a late answer still needed; returns what the legend shows, by its words."""
    handles: dict[str, Any] = {}
    width = axes.get_xlim()[1]
    for outcome, colour in OUTCOMES.items():
        own = [bar for bar in bars if bar.outcome == outcome]
        if not own:
            continue
        places, starts = [rows[bar.client] for bar in own], [bar.start for bar in own]
        worked = [bar.worked for bar in own]
        if colour:  # white edges: two answers of a client, one right after the other, are two bars
            handles[outcome] = axes.barh(
                places, worked, left=starts, height=0.66, color=colour, edgecolor="white", linewidth=1, zorder=3
            )
        if outcome in MARKS:
            style: Any = {"color": INK, "markersize": 5, "markerfacecolor": "none", "linestyle": "none", "zorder": 4}
            (mark,) = axes.plot([bar.mark(INSIDE * width) for bar in own], places, MARKS[outcome], **style)
            handles[outcome] = (handles[outcome][0], mark) if colour else mark
        if colour == ORANGE:
            ends = [start + length for start, length in zip(starts, worked, strict=True)]
            rests = [bar.seconds - bar.worked for bar in own]
            thin = axes.barh(places, rests, left=ends, height=0.16, color=colour, alpha=0.45, zorder=2)
            handles["time that it still needed"] = thin
    for bar in bars:
        if bar.staleness:
            fits = bar.seconds > DIGIT * (1 + len(str(bar.staleness))) * width
            place: Any = (bar.start + bar.seconds, rows[bar.client])
            shift: Any = (-2.5 if fits else 1.5, 0)
            axes.annotate(
                str(bar.staleness),
                place,
                shift,
                textcoords="offset points",
                ha="right" if fits else "left",
                va="center",
                fontsize=7.5,
                color="white" if fits else INK,
                zorder=5,
                annotation_clip=True,
            )
    return handles


def draw_rounds(axes: Axes, records: Sequence[Record], time: Mapping[str, Any]) -> dict[str, Any]:
    """Draw where rounds end, their numbers, and their deadlines; returns what the legend shows, by its words."""
    steps = time["wait"] == "buffer"
    deadline = float(time["deadline"]) if time["wait"] == "deadline" else math.inf
    handles, numbered, narrow = dict[str, Any](), -math.inf, NARROW * axes.get_xlim()[1]
    for record in records:
        began, end = float(record["began"]), float(record["clock"])
        # Behind the bars: their numbers and ends can be seen, and the line is seen between them.
        line = axes.axvline(end, color=INK, linewidth=1, linestyle="--", zorder=2.5)
        handles["step of the server" if steps else "end of a round"] = line
        place: Any = (end if steps else (began + end) / 2, 1.0)
        if place[0] - numbered > narrow:
            what = ("step " if steps else "round ") if record is records[0] else ""
            shift: Any = (0, 8 if math.isfinite(deadline) else 4)
            axes.annotate(
                f"{what}{record['round']}",
                place,
                shift,
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
            numbered = place[0]
        if began + deadline <= axes.get_xlim()[1]:
            style: Any = {"color": ORANGE, "markersize": 7, "linestyle": "none", "clip_on": False, "zorder": 6}
            # 7 is matplotlib's triangle that stands on its tip
            (mark,) = axes.plot([began + deadline], [1], marker=7, transform=axes.get_xaxis_transform(), **style)
            handles["deadline of a round"] = mark
    return handles


def draw_gaps(axes: Axes, bars: Sequence[Bar], end: float) -> dict[str, Any]:
    """Draw when nobody was at work; returns what the legend shows, by its words."""
    handles, until = dict[str, Any](), 0.0
    for start, stop in sorted([(bar.start, bar.start + bar.worked) for bar in bars] + [(end, end)]):
        if start - until > ROUNDED * end:
            span = axes.axvspan(until, start, color=GREY, alpha=0.2, linewidth=0, zorder=0.5)
            handles["nobody at work"] = span
        until = max(until, stop)
    return handles


def timeline_note(run: Run, groups: Sequence[RunGroup], records: Sequence[Record], asked: int) -> str:
    """What the picture shows, and of what."""
    time = run.config["time"]
    ends = {
        "all": "A round ends with its last answer.",
        "deadline": f"A round ends {time['deadline']:g} seconds after its begin, or when nobody is at work any more.",
        "first": "A round ends with the last answer that is wanted; who is still at work then stops.",
        "buffer": "The server makes a step when enough answers have come; those that came before wait for it.",
    }
    what = "steps" if time["wait"] == "buffer" else "rounds"
    shown = "All" if len(records) == len(run.rounds) else f"The first {len(records)} of"
    note = f"{shown} {len(run.rounds)} {what} of {run.algorithm}. A bar is one answer, from when the client was asked. "
    note += ends[time["wait"]]
    if "started" in records[0]:
        note += " Staleness: the steps between the model that a client began with and the one that its answer changes."
        absent = sum(int(record["asked"]) - len(record["started"]) for record in records)
        note += f" Not shown: {count_text(absent, 'client')} asked and dropped out." if absent else ""
    more = asked - MOST_CLIENTS
    note += (
        f" Shown are the {MOST_CLIENTS} clients with the lowest numbers; {more} more were asked." if more > 0 else ""
    )
    several = len(groups) > 1 or len(groups[0].runs) > 1
    return note + (" One run is shown." if several else "")
