"""What a run leaves behind, and the files in its folder, readable with any text editor:

    run.toml            the whole configuration, resolved; its hash is in the folder's name
    rounds.jsonl        one JSON object a round, appended as rounds end
    federation.json     sizes and labels of the clients (for pictures)
    run.json            facts about the execution: state, engine and why, device, versions
    model.safetensors   the global model, by the network's own parameter names
    conformal.json      coverage and size of its prediction sets, where `askew conformal` measured them
    checkpoint.*        all that a resume needs (see checkpoint.py)

Everything is written atomically or appended by whole lines; nothing is ever pickled.
"""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .curves import rounds_to
from .roll_call import RollCall, call_run
from .toml import read_toml

try:
    import fcntl
except ImportError:  # not a POSIX system: only folders cannot be locked there
    fcntl = None  # type: ignore[assignment]

Record = dict[str, Any]  # of one round
DIVERGED = "diverged"  # the state of a run that was stopped because it diverged
NAMED_TABLES = ("data", "partition", "participation", "model", "algorithm")  # tables that choose something by its name


@dataclass
class Run:
    """A run: its configuration, the records of its rounds and the figures that follow from them."""

    config: dict[str, Any]
    rounds: list[Record] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
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
        """Is nothing left to train? All rounds are there, or it diverged and was to stop then."""
        return self.finished or self.facts.get("state") == DIVERGED

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
    if not (folder / "run.toml").is_file():
        raise StoreError(
            f"{str(folder)!r} is not a run folder: it has no run.toml; name a folder that `askew run` made."
        )
    config = read_toml(folder / "run.toml")
    if not isinstance(config.get("rounds"), int) or not all(
        isinstance(config.get(table), dict) and "name" in config[table] for table in NAMED_TABLES
    ):
        raise StoreError(
            f"{folder / 'run.toml'} does not tell a whole run (truncated?); "
            "restore it, or remove the folder and run again."
        )
    facts = read_json(folder / "run.json")
    if facts.get("state") == "running" and not is_locked(folder):
        facts["state"] = "interrupted"  # its process was killed and could not say so
    return Run(
        config=config,
        rounds=read_rounds(folder / "rounds.jsonl"),
        facts=facts,
        federation=read_json(folder / "federation.json"),
        conformal=read_json(folder / "conformal.json"),
        folder=folder,
    )


def load_all(folders: Iterable[str | Path]) -> list[Run]:
    """Read run folders, each once, and those inside of other folders in the order in which they were begun."""
    runs: dict[Path, Run] = {}
    for folder in map(Path, folders):
        inside = sorted(folder.glob("*/run.toml"), key=lambda file: (file.stat().st_mtime_ns, file))
        is_run = (folder / "run.toml").is_file() or not inside
        for run_folder in [folder] if is_run else [file.parent for file in inside]:
            if run_folder.resolve() not in runs:
                runs[run_folder.resolve()] = load(run_folder)
    return list(runs.values())


def read_rounds(path: Path) -> list[Record]:
    """The records of rounds.jsonl; a last line without its end was cut off while writing and is left out."""
    if not path.exists():
        return []
    rounds: list[Record] = []
    text = read_text(path)
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or record.get("round") != number:
                raise ValueError
        except ValueError:
            if number == text.count("\n") + 1:
                break
            raise StoreError(
                f"{path}, line {number} is not the record of round {number}; "
                "restore the file, or remove the folder and run again."
            ) from None
        rounds.append(record)
    return rounds


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise StoreError(
            f"{path} is not a text file in UTF-8; restore it, or remove the folder and run again."
        ) from None
    except OSError as e:
        raise StoreError(f"cannot read {path}: {e.strerror}; check that it exists and that you may read it.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or nothing where the file is not there."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
        if not isinstance(value, dict):
            raise ValueError
    except ValueError:
        raise StoreError(
            f"{path} is not a JSON object (truncated?); restore it, or remove the folder and run again."
        ) from None
    return value


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


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while a file is written into a StoreError that says what to do."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            "free some space and start the run again: it goes on from what is stored"
            if full
            else "name a folder you can write, with --out"
        )
        raise StoreError(f"cannot write {path}: {e.strerror or e}; {advice}.") from None


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside, flush to the disk, then rename: a reader sees the old file or the new one, never a part."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomic(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, to_json(value, indent=1) + "\n")


def append_lines(path: Path, records: Sequence[Record]) -> None:
    """Append whole lines with one write."""
    with explain_write_errors(path), open(path, "a", encoding="utf-8") as file:
        file.write("".join(to_json(r) + "\n" for r in records))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a run folder and lock it; refuse at once if another process has it. The lock ends with its process."""
    if fcntl is None:
        raise StoreError(
            f"cannot lock {folder}: storing a run needs a POSIX system, as Linux or macOS; use one, or leave out= away."
        )
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")  # noqa: SIM115 - closed below, after the run
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StoreError(
            f"another process is writing {folder}; wait for it to end, or run another configuration."
        ) from None
    try:
        yield
    finally:
        if [p.name for p in folder.iterdir()] == [".lock"]:  # the run was refused before it began
            (folder / ".lock").unlink()
            folder.rmdir()
        file.close()


def is_locked(folder: Path) -> bool:
    """Is a process writing this run folder?"""
    if fcntl is None:
        return False
    try:
        with open(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
