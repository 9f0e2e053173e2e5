"""Real networks at the papers' settings on a GPU: all rows of one table, each by a command that a user would give.

Every row is timed as often as asked, in processes of their own, one after the other. Times of `askew bench` are
milliseconds a round. Of an experiment, rounds are timed by its own records, or the whole command from the shell. Rows
that need CIFAR-10 are left out where its files are not found. With --minutes no row begins that late.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FEDDPC = (
    "--set data.name=cifar10 --set model.name=lenet --set partition.clients=100 --set partition.alpha=0.2 "
    "--set participation.cohort=10 --set local.batch=256"
)
CNN = "--only case=cifar10-cnn-0.1 --only case=cifar10-cnn-0.3"
FOUR = "--only method=FedAvg --only method=SCAFFOLD --only method=FedDyn --only method=FedDC"
METHODS = "--only method=FedPDC --only method=FedAvg --only 'method=FedAvg, equal weights' --only method=MOON"

Times = dict[str, float]  # by what was timed


class Row(NamedTuple):
    """One line of the table."""

    name: str
    command: str  # the words behind `askew`; {out} is an empty folder
    read: Callable[[str, Path, float], Times]  # times from what it printed, its folder and its seconds
    warm: bool = False  # whether it is run once before, which is not timed
    cifar10: bool = False  # whether it needs the files


def bench_ms(printed: str, out: Path, seconds: float) -> Times:
    """Milliseconds a round, of a work or of a paper's run."""
    page = json.loads(printed)
    return {"ms a round": [*page["works"], *page["experiments"]][0]["round_ms"]}


def record_ms(printed: str, out: Path, seconds: float) -> Times:
    """Milliseconds a run and round, by the records of all runs but for their first rounds."""
    files = sorted(out.rglob("rounds.jsonl"))
    times = [json.loads(line)["seconds"] for file in files for line in file.read_text().splitlines()[3:]]
    return {"ms a run and round": 1e3 * statistics.median(times), "rounds": float(len(times))}


def shell_seconds(printed: str, out: Path, seconds: float) -> Times:
    return {"s from the shell": seconds}


def run_seconds(printed: str, out: Path, seconds: float) -> Times:
    """Seconds of all rounds, and from the shell."""
    [file] = out.rglob("rounds.jsonl")
    rounds = sum(json.loads(line)["seconds"] for line in file.read_text().splitlines())
    return {"s of rounds": rounds, "s from the shell": seconds}


ROWS = [
    Row("resnet18 bf16", "bench --work resnet18-10x2x256 --dtype bf16 --rounds 5 --json", bench_ms),
    Row("cnn64 bf16", "bench --work cnn64-15x50x50 --dtype bf16 --rounds 3 --json", bench_ms),
    Row("cnn64 tf32", "bench --work cnn64-15x50x50 --dtype tf32 --rounds 3 --json", bench_ms),
    Row("cnn64 small", "bench --work cnn64-10x10x50 --dtype tf32 --rounds 7 --json", bench_ms),
    Row("lenet 220", "bench --work lenet-220x10x64 --dtype tf32 --rounds 4 --json", bench_ms),
    Row("charlstm", "bench --work charlstm-10x10x10 --rounds 5 --json", bench_ms),
    Row("feddc", f"reproduce feddc/table1-cifar10 --only case=D1-15 {FOUR} --dtype tf32 --stop-after 45s "
        "--out {out}/runs --results {out}/results", record_ms, cifar10=True),
    Row("fedpdc", f"reproduce fedpdc/table2 {CNN} {METHODS} --only method=FedProx --dtype tf32 "
        "--out {out}/runs --results {out}/results", shell_seconds, cifar10=True),
    Row("feddpc", f"run {FEDDPC} --set local.lr=0.1 --set algorithm.name=feddpc --set rounds=400 --out {{out}}",
        run_seconds, warm=True, cifar10=True),
    Row("grid", "reproduce feddpc/table2 --only case=cifar10-0.2 --seeds 1 --out {out}/runs --results {out}/results",
        shell_seconds, cifar10=True),
    Row("sweep of 5", f"sweep {FEDDPC} --set rounds=300 --over local.lr=0.01,0.03,0.1,0.2,0.3 --out {{out}}",
        shell_seconds, cifar10=True),
    Row("sweep of 1", f"sweep {FEDDPC} --set rounds=300 --over local.lr=0.1 --out {{out}}", shell_seconds,
        cifar10=True),
]  # fmt: skip


def time_row(row: Row) -> Times:
    """Run a row's command in an empty folder and read its times."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        words = shlex.split(row.command.replace("{out}", folder))
        program = [sys.executable, "-c", "import sys; from askew.cli.main import main; sys.exit(main())"]
        began = time.perf_counter()
        done = subprocess.run([*program, *words], capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if done.returncode not in (0, 130):  # 130: --stop-after
            raise RuntimeError(f"{row.name}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        return row.read(done.stdout, out, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--json", type=Path, help="file that is written after every row")
    options = parser.parse_args()
    end, found = time.monotonic() + 60 * options.minutes, dict[str, list[Times]]()
    has_cifar10 = bool(os.environ.get("ASKEW_DATA"))
    for row in (row for row in ROWS if row.name in options.rows):
        if time.monotonic() > end or (row.cifar10 and not has_cifar10):
            print(f"{row.name}: left out", flush=True)
            continue
        try:
            for n in range(options.repeat + row.warm):
                times = time_row(row)
                if n >= row.warm:
                    found.setdefault(row.name, []).append(times)
        except RuntimeError as problem:
            print(problem, flush=True)
            continue
        for what in found[row.name][0]:
            values = ", ".join(f"{times[what]:.4g}" for times in found[row.name])
            print(f"| {row.name} | {what} | {values} | `askew {row.command}` |", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
