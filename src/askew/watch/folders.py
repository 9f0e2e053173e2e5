"""The run folders below a folder, read again as they change."""

from __future__ import annotations

import stat
from pathlib import Path
from threading import Condition, Event, Thread

from ..core.files import printable
from ..core.records import Record
from ..errors import AskewError, StoreError
from ..experiment.folder_lock import is_locked
from ..experiment.store import SEALED, check_records, find_run_folders, load_checked, parse_sealed
from ..report.columns import Columns
from ..report.views import BROKEN, READING, ShownRun, shown_columns

PAUSE = 0.5  # seconds between two looks at runs that train
YIELD = 0.001  # seconds after a run was read, in which requests are answered
SLOW = 8  # looks, after which other runs are looked at too
LARGEST_PART = 2**24  # bytes of new records that are read at once
GONE = "gone"  # the state of a folder that is no longer there

Signature = tuple[tuple[int, int, int] | None, ...]  # of the files of a folder: when changed, how large, which file


class WatchedRun(ShownRun):
    """A run folder as it was last read."""

    def __init__(self, number: int, folder: Path, name: str) -> None:
        super().__init__(number, name)
        self.folder = folder
        self.version = 0  # of all that is watched, when this was last changed
        self.signature: Signature = ()
        self.offset: int | None = None  # in rounds.jsonl, after the last record that was read; None: not known

    def refresh(self) -> bool:
        """Read what has changed; says whether anything has."""
        signature = file_signature(self.folder)
        if signature == self.signature and not (self.state == "running" and not is_locked(self.folder)):
            return False
        before, self.signature = self.signature, signature
        if signature[0] is None and not self.folder.is_dir():
            self.state = GONE
        elif not (self._grew(before) and self._read_new_records()):
            self._read_all()
        return True

    def _grew(self, before: Signature) -> bool:
        """Is all that has changed a longer rounds.jsonl?"""
        *others, old = before or (None,)
        *same, new = self.signature
        return (
            self.state == "running"
            and others == same
            and old is not None
            and new is not None
            and (old[2] == new[2] and new[1] > old[1])
        )

    def _read_all(self) -> None:
        self.offset = None
        try:
            built: list[Columns] = []
            run = load_checked(self.folder, lambda run: built.append(shown_columns(run)))
        except AskewError as e:
            self.state, self.problem = BROKEN, printable(str(e))
            return
        self.show(run, built[0])

    def _read_new_records(self) -> bool:
        """Add the records that were appended; says whether all of them are as they should be."""
        path = self.folder / "rounds.jsonl"
        try:
            with open(path, "rb") as file:
                if self.offset is None:
                    self.offset = sum(len(file.readline()) for _ in range(self.columns.count))
                file.seek(self.offset)
                part = file.read(LARGEST_PART)
            whole = part[: part.rfind(b"\n") + 1]
            records = [parse_sealed(line.decode(), True) for line in whole.splitlines()]
            check_next(path, records, self.columns.count)
            self.columns.extend(records)
        except (AskewError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return False
        self.offset += len(whole)
        if len(part) == LARGEST_PART:
            self.signature = (*self.signature[:-1], None)  # there is more to read
        return True


def check_next(path: Path, records: list[Record], count: int) -> None:
    """Refuse records that do not follow on so many rounds."""
    if [record.get("round") for record in records] != list(range(count + 1, count + len(records) + 1)):
        raise ValueError("other rounds")
    check_records(path, records)


def file_signature(folder: Path) -> Signature:
    """What changes when a file of a run folder does: times and sizes; rounds.jsonl, which grows, is the last."""
    names = (*(name for name in SEALED if name != "rounds.jsonl"), "rounds.jsonl")
    return tuple(map(file_state, (folder / name for name in names)))


def file_state(path: Path) -> tuple[int, int, int] | None:
    """When a file was changed, how large it is and which one it is; None where it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size if stat.S_ISREG(found.st_mode) else -1, found.st_ino)


class RunFolders:
    """All runs below a folder; a thread reads them and notifies those who wait of changes."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise StoreError(
                f"there is no folder {str(root)!r}; start a run first, or name the folder that holds the run folders."
            )
        self.root = root
        self.runs: list[WatchedRun] = []  # a run's place is its number; one whose folder is gone stays
        self.version = 0
        self.changed = Condition()
        self._known: dict[Path, WatchedRun] = {}
        self.stopped = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._looks = 0

    def start(self) -> None:
        """Begin to read the folders."""
        self._thread.start()

    def stop(self) -> None:
        """Read no further."""
        self.stopped.set()

    def _watch(self) -> None:
        while not self.stopped.is_set():
            self.look()
            self.stopped.wait(PAUSE)

    def look(self) -> None:
        """Look for new folders and changed files: at runs that train each time, at the others now and then."""
        every = self._looks % SLOW == 0
        self._looks += 1
        if self._looks % 2:
            self._find_new()
        for run in self._in_order() if every else [run for run in self.runs if run.state in ("running", READING)]:
            if self.stopped.is_set():
                return
            if run.refresh():
                with self.changed:
                    self.version += 1
                    run.version = self.version
                    self.changed.notify_all()
                self.stopped.wait(YIELD)

    def _find_new(self) -> None:
        new = [folder for folder in find_run_folders(self.root) if folder not in self._known]
        for folder in sorted(new):
            name = str(folder.relative_to(self.root)) if folder != self.root else folder.resolve().name
            run = WatchedRun(len(self.runs), folder, printable(name))
            self._known[folder] = run
            self.runs.append(run)
        if new:
            with self.changed:
                self.version += 1
                for folder in new:
                    self._known[folder].version = self.version
                self.changed.notify_all()

    def _in_order(self) -> list[WatchedRun]:
        """The runs, those whose records changed last first, as these are looked at most."""
        unread = any(run.state == READING for run in self.runs)
        at = {run.number: file_state(run.folder / "rounds.jsonl") or (0, 0, 0) for run in self.runs} if unread else {}
        return sorted(self.runs, key=lambda run: at[run.number], reverse=True) if unread else self.runs

    def changes(self, since: int, seconds: float) -> tuple[int, list[WatchedRun]]:
        """Wait, at most so long, for a version after `since`; the version and the runs that changed after `since`."""
        with self.changed:
            self.changed.wait_for(lambda: self.version > since, seconds)
            return self.version, [run for run in self.runs if run.version > since]
