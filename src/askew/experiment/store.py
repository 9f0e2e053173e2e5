"""What a run leaves behind, and the files in its folder, readable with any text editor:

    run.toml            the whole configuration, resolved; its hash is in the folder's name
    rounds.jsonl        one JSON object a round, appended as rounds end
    federation.json     sizes and labels of the clients (for pictures)
    run.json            facts about the execution: state, engine and why, device, versions
    model.safetensors   the model whose accuracy is reported, by the network's own parameter names
    tracking.json       which records of trackers are this run's, where `track` was set
    conformal.json      coverage and size of its prediction sets, where `askew conformal` measured them
    checkpoint.*        all that a resume needs, and the one before it (see checkpoint.py)

Everything is written atomically or appended by whole lines; nothing is ever pickled. Every
file holds a hash of what is in it, each line of rounds.jsonl its own, so that damage is found when it is read. Files of
older versions have none and are taken as they are.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.files import flush_to_disk, is_file, is_readable_file, write_atomically
from ..core.records import Record
from ..errors import AskewError, StoreError, StoreWarning
from . import shown
from .curves import rounds_to
from .folder_lock import explain_write_errors, is_locked
from .roll_call import RollCall, call_run
from .toml import read_stored_toml, text_hash

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACKING = "tracking.json"  # the file in which trackers note which of their records is this run's
DIVERGED = "diverged"  # the state of a run that was stopped because it diverged
REACHED = "reached"  # and of one that was stopped because its accuracy was high enough
STOPS = ("stop_diverged", "stop_at")  # settings of [evaluation] that change no round, only how many there are
CHECKSUM = re.compile(r',?\s*"checksum": "([0-9a-f]{16})"\s*\}\s*\Z')  # the end of a JSON object
SEALED = ("run.toml", "run.json", "rounds.jsonl", "federation.json")  # files that always hold a checksum
NUMBERS = ("seconds", "bytes_up", "bytes_down", "dropped")  # keys of every record
DEPTH = 2  # levels below a folder on which its run folders are looked for
NAMED_TABLES = ("data", "partition", "participation", "model", "algorithm")  # tables that choose something by its name


@dataclass
class Run:
    """A run: its configuration, the records of its rounds and the figures that follow from them."""

    config: dict[str, Any]  # the content of run.toml
    rounds: list[Record] = field(default_factory=list)  # one record for each round, as in rounds.jsonl
    facts: dict[str, Any] = field(default_factory=dict)  # how it was computed: the content of run.json
    federation: dict[str, Any] = field(default_factory=dict)  # clients and their samples: federation.json
    folder: Path | None = None  # where it is stored; None: nowhere
    conformal: dict[str, Any] = field(default_factory=dict, repr=False)  # what `askew conformal` measured
    model: dict[str, Any] = field(default_factory=dict, repr=False)  # tensors by name; not read back with the folder

    @property
    def name(self) -> str:
        return self.folder.name if self.folder else str(self.facts.get("name", "run"))

    @property
    def algorithm(self) -> str:
        return str(self.config["algorithm"]["name"])

    @property
    def finished(self) -> bool:
        return len(self.rounds) >= int(self.config["rounds"])

    @property
    def over(self) -> bool:
        """Is nothing left to train? All rounds are there, or it was to stop early and did."""
        return self.finished or self.facts.get("state") in (DIVERGED, REACHED)

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Rounds and values of one record key, where a number was recorded; "table.name" is an entry of a table."""
        table, _, name = key.partition(".")
        values = [
            (r["round"], r[table].get(name) if name and isinstance(r.get(table), dict) else r.get(key))
            for r in self.rounds
        ]
        points = [(round, float(value)) for round, value in values if isinstance(value, (int, float))]
        return [round for round, _ in points], [value for _, value in points]

    def _best(self) -> tuple[int | None, float | None]:
        """The first round with the highest accuracy, and that accuracy."""
        rounds, values = self.curve("accuracy")
        if not values:
            return None, None
        best = max(range(len(values)), key=lambda i: (values[i], -i))
        return rounds[best], values[best]

    @property
    def best_accuracy(self) -> float | None:
        return self._best()[1]

    @property
    def best_round(self) -> int | None:
        return self._best()[0]

    def last(self, key: str) -> float | None:
        """The last value of a record key, where a number was recorded."""
        return next((float(r[key]) for r in reversed(self.rounds) if isinstance(r.get(key), (int, float))), None)

    @property
    def final_accuracy(self) -> float | None:
        return self.last("accuracy")

    @property
    def seconds_per_round(self) -> float | None:
        """Mean wall time of a round, the first, which warms up, left out where there are more.

        Evaluation is excluded, but for short rounds on a GPU, where it passes beside the next round.
        """
        seconds = [float(r["seconds"]) for r in self.rounds]
        counted = seconds[1:] or seconds
        return sum(counted) / len(counted) if counted else None

    @property
    def bytes_up(self) -> int:
        return sum(int(r["bytes_up"]) for r in self.rounds)

    @property
    def bytes_down(self) -> int:
        return sum(int(r["bytes_down"]) for r in self.rounds)

    @property
    def dropped(self) -> int:
        return sum(int(r["dropped"]) for r in self.rounds)

    @property
    def deployed(self) -> bool:
        """Were its clients real ones?"""
        return self.facts.get("engine") == "flower"

    def roll_call(self) -> RollCall:
        """Whose answers were lost, and why."""
        return call_run(self.rounds, self.federation, self.deployed)

    def rounds_to(self, target: float) -> int | None:
        """The first evaluated round with at least this accuracy; None if it was never reached."""
        return rounds_to(*self.curve("accuracy"), target)

    @property
    def clock(self) -> float | None:
        """The seconds of the virtual clock after the last round; None without one."""
        return self.last("clock")

    def seconds_to(self, target: float) -> float | None:
        """The virtual clock after the first evaluated round with at least this accuracy; None if there is none."""
        reached = self.rounds_to(target)
        return None if reached is None else self.rounds[reached - 1].get("clock")

    def frame(self) -> Any:
        """One row for each round, as a frame of pandas."""
        report = shown.shown_by()
        return report.data_frame(report.round_rows(self))

    def plot(self, key: str = "accuracy", size: str | None = None, over: str = "round") -> Figure:
        """A figure of one record key over the rounds, or with over="clock" over the seconds of the virtual clock;
        `size` is "column" or "page" of a two-column paper.
        """
        figure: Figure = shown.shown_by().draw_key([self], key, size, over)
        return figure

    def __repr__(self) -> str:
        try:
            text: str = shown.shown_by().run_text(self)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # not a whole run
            return f"Run({self.config!r:.200})"
        return text

    def _repr_html_(self) -> str:
        html: str = shown.shown_by().run_html(self)
        return html

    def summary(self) -> dict[str, Any]:
        """The figures that `askew run --json` prints."""
        call = self.roll_call()
        return {
            "run": str(self.folder) if self.folder else None,
            "name": self.name,
            "algorithm": self.algorithm,
            "best_accuracy": self.best_accuracy,
            "best_round": self.best_round,
            "final_accuracy": self.final_accuracy,
            "rounds": len(self.rounds),
            "finished": self.finished,
            **({"diverged": self.facts["diverged"]} if "diverged" in self.facts else {}),
            "seconds_per_round": self.seconds_per_round,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            **({"clock": self.clock} if self.clock is not None else {}),
            "dropped": self.dropped,
            "lost_answers": call.lost,
            "largest_lost_share": call.largest_share,
            "never_used": call.unused,
            "engine": self.facts.get("engine"),
            "device": self.facts.get("device"),
        }


def load(folder: str | Path) -> Run:
    """Read a run folder back; a missing or broken file is named."""
    folder = Path(folder)
    if not folder.is_dir():
        raise StoreError(
            f"there is no run folder {str(folder)!r}; name a folder that `askew run` made, such as runs/NAME."
        )
    names = names_in(folder)
    if "run.toml" not in names:
        if "rounds.jsonl" in names:
            raise StoreError(f"{folder} holds a run, but it has no run.toml; restore it, or run again with --fresh.")
        raise StoreError(
            f"{str(folder)!r} is not a run folder: it has no run.toml; name a folder that `askew run` made."
        )
    config = read_stored_toml(folder / "run.toml")
    if not isinstance(config.get("rounds"), int) or not all(
        isinstance(config.get(table), dict) and isinstance(config[table].get("name"), str) for table in NAMED_TABLES
    ):
        raise StoreError(
            f"{folder / 'run.toml'} does not describe a whole run (truncated?); "
            "restore it, or remove the folder and run again."
        )
    facts, rounds = read_json(folder / "run.json"), read_rounds(folder / "rounds.jsonl")
    federation, measured = read_json(folder / "federation.json"), read_json(folder / "conformal.json")
    check_sealed(folder)
    check_records(folder / "rounds.jsonl", rounds)
    is_whole = len(rounds) >= config["rounds"] and (folder / "model.safetensors").exists()
    if facts.get("state") == "running" and not is_locked(folder):
        facts["state"] = "finished" if is_whole else "interrupted"  # its process was killed and could not say so
    if facts.get("state") == "finished" and len(rounds) < config["rounds"]:
        raise StoreError(
            f"{folder / 'rounds.jsonl'} ends after round {len(rounds)}, but the run had all its {config['rounds']} "
            "rounds; restore the file, or run it again with --fresh."
        )
    return Run(
        config=config | find_plugins(config, folder),
        rounds=rounds,
        facts=facts,
        federation=federation,
        conformal=measured,
        folder=folder,
    )


def names_in(folder: Path) -> list[str]:
    """The names of what is in a folder."""
    try:
        return [path.name for path in folder.iterdir()]
    except OSError as e:
        raise StoreError(f"cannot read {folder}: {e.strerror}; check that you may read it, or leave it out.") from None


def find_plugins(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The plugins that a file in this folder names, from there if they are there, else from the current folder."""
    named = config.get("plugins")
    if not isinstance(named, list):
        return {}
    return {"plugins": [str(folder / str(path)) if is_file(folder / str(path)) else path for path in named]}


def check_sealed(folder: Path) -> None:
    """Refuse a folder in which only some files hold a checksum: the others have lost theirs."""
    contents = {name: read_bytes(folder / name) for name in SEALED if (folder / name).exists()}
    sealed = {name: b"checksum" in content for name, content in contents.items() if content}
    lost = [str(folder / name) for name, has in sealed.items() if not has]
    if any(sealed.values()) and lost:
        raise StoreError(
            f"{' and '.join(lost)} has lost its checksum, so it is damaged; restore it, or run again with --fresh."
        )


def check_records(path: Path, rounds: Sequence[Record]) -> None:
    """Refuse records without the numbers that every round has."""
    for record in rounds:
        numbers = all(isinstance(record.get(key), (int, float)) for key in NUMBERS)
        if not numbers or not isinstance(record.get("participants", []), list):
            raise StoreError(
                f"{path}, line {record['round']} is not the record of a round: one of participants, "
                f"{', '.join(NUMBERS)} is missing or of another type; restore the file, or run again with --fresh."
            )


def find_run_folders(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The run folders below a folder, damaged ones and those that may not be read too; it itself if it is one."""
    try:
        with os.scandir(root) as found:
            entries = list(found)
    except PermissionError:
        yield root
        return
    except OSError:
        return
    names, inside = {entry.name for entry in entries}, any(map(leads_to_folder, entries))
    # a run.toml beside folders and without results is somebody's configuration, as `askew tune` writes one
    if names & {"run.json", "rounds.jsonl"} or ("run.toml" in names and not inside):
        yield root
        return
    for entry in entries if depth else ():
        if not entry.name.startswith(".") and leads_to_folder(entry):
            yield from find_run_folders(Path(entry.path), depth - 1)


def leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Is this a folder, or a link to one? A link to itself is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def begun_at(folder: Path) -> int:
    """When a run was begun, in nanoseconds; 0 if its configuration is lost."""
    path = folder / "run.toml"
    return path.stat().st_mtime_ns if is_file(path) else 0


def load_all(folders: Iterable[str | Path], check: Callable[[Run], object] = lambda run: None) -> list[Run]:
    """Read run folders, each once, and those inside of other folders in the order in which they were begun.

    A damaged run among others is left out, with a warning; so is one with which `check` fails.
    """
    return load_whole(folders, check)[0]


def load_whole(
    folders: Iterable[str | Path], check: Callable[[Run], object] = lambda run: None
) -> tuple[list[Run], dict[Path, str]]:
    """As `load_all`, and by folder why the damaged ones were left out."""
    runs: dict[Path, Run | None] = {}
    problems: dict[Path, AskewError] = {}
    for folder in map(Path, folders):
        found = sorted(find_run_folders(folder), key=lambda run: (begun_at(run), run))
        for run_folder in found or [folder]:
            if run_folder.resolve() not in runs:
                try:
                    runs[run_folder.resolve()] = load_checked(run_folder, check)
                except AskewError as e:
                    if run_folder == folder and not is_file(folder / "run.toml"):
                        raise  # somebody named a wrong folder
                    runs[run_folder.resolve()] = None
                    problems[run_folder] = e
    whole = [run for run in runs.values() if run is not None]
    if problems and not whole:
        raise next(iter(problems.values()))
    for problem in problems.values():
        warnings.warn(f"a run is left out: {problem}", StoreWarning, stacklevel=3)
    return whole, {folder: str(problem) for folder, problem in problems.items()}


def load_checked(folder: Path, check: Callable[[Run], object]) -> Run:
    """Read a run folder; if `check` fails with what is in it, say so."""
    run = load(folder)
    try:
        check(run)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise StoreError(
            f"the run {folder} holds something that askew does not write ({type(e).__name__}: {e}); "
            "restore its files, or run it again with --fresh."
        ) from None
    return run


def read_rounds(path: Path) -> list[Record]:
    """The records of rounds.jsonl; a last line without its end was cut off while writing and is left out."""
    rounds, problem = intact_rounds(path)
    if problem:
        raise StoreError(f"{problem}; restore the file, or remove the folder and run again.")
    return rounds


def intact_rounds(path: Path) -> tuple[list[Record], str]:
    """The records of rounds.jsonl before the first damaged line, and what is wrong with that line, if there is one."""
    if not path.exists():
        return [], ""
    rounds: list[Record] = []
    content = read_bytes(path)
    sealed = b'"checksum"' in content  # then every line must have one
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        last = number == len(lines)  # without its end
        if last and not line:
            break
        try:
            record = parse_sealed(line.decode(), sealed)
            if record.get("round") != number:
                raise ValueError
        except ValueError:
            return rounds, "" if last else f"{path}, line {number} is not the record of round {number} (damaged?)"
        rounds.append(record)
    return rounds, ""


def parse_sealed(text: str, sealed: bool | None = None) -> dict[str, Any]:
    """A JSON object without its checksum; a ValueError if it is not what was written.

    `sealed` says that there must be a checksum; without it, there may be one.
    """
    at = text.rfind('"checksum"')  # from there on, as a search of a whole long line takes longer than its parsing
    found = CHECKSUM.search(text, max(0, text.rfind(",", 0, at))) if at >= 0 else None
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    if found is None and (sealed or "checksum" in value):
        raise ValueError("it has no checksum, or a damaged one")
    if found and text_hash(text[: found.start()].rstrip()) != found[1]:
        raise ValueError("its checksum does not fit")
    value.pop("checksum", None)
    return value


def read_bytes(path: Path) -> bytes:
    """The content of a regular file."""
    if path.exists() and not is_readable_file(path):
        raise StoreError(f"cannot read {path}: it is no regular file, or far too large; restore it.")
    try:
        return path.read_bytes()
    except OSError as e:
        raise StoreError(f"cannot read {path}: {e.strerror}; check that it exists and that you may read it.") from None


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise StoreError(
            f"{path} is not a text file in UTF-8; restore it, or remove the folder and run again."
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or nothing where the file is not there."""
    if not path.exists():
        return {}
    text = read_text(path)
    try:
        return parse_sealed(text)
    except ValueError:
        what = "is damaged: its checksum does not fit" if '"checksum"' in text else "is not a JSON object (truncated?)"
        raise StoreError(f"{path} {what}; restore it, or remove the folder and run again.") from None


def jsonable(value: Any) -> Any:
    """A copy of nested values in which numbers that JSON lacks (nan, infinities) are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [jsonable(v) for v in value]
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """The value as JSON text; nan and infinities become null."""
    return json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False, indent=indent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    with explain_write_errors(path), write_atomically(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; of a name of a file in it, what is not UTF-8 becomes a question mark."""
    write_atomic(path, text.encode(errors="replace"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with a checksum."""
    write_text(path, seal(value, indent=1) + "\n")


def seal(value: Mapping[str, Any], indent: int | None = None) -> str:
    """A JSON object as text whose last entry is a checksum of what comes before."""
    body = to_json(value, indent)[:-1].rstrip()  # without the closing brace
    before, after = ("\n ", "\n") if indent else (" ", "")
    return f'{body}{"," if value else ""}{before}"checksum": "{text_hash(body)}"{after}}}'


def write_lines(path: Path, records: Sequence[Record]) -> None:
    """Write rounds.jsonl anew."""
    write_text(path, "".join(seal(record) + "\n" for record in records))


def append_lines(path: Path, records: Sequence[Record]) -> None:
    """Append whole lines with one write; `flush_records` brings them to the disk."""
    with explain_write_errors(path), open(path, "a", encoding="utf-8") as file:
        file.write("".join(seal(record) + "\n" for record in records))


def flush_records(path: Path) -> None:
    """Wait until the records that were appended are on the disk: a checkpoint without them could not be used."""
    with explain_write_errors(path):
        flush_to_disk(path)
