"""`askew.sweep`, `askew.tune`, `askew.compare` and `askew.report`: what the commands of these names do, from Python."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.records import Record
from ..errors import AskewError, Remark, StoreError
from ..experiment.store import Run, load_whole
from .page import check_run
from .runs import ComparisonTable, Runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..core.algorithm import Algorithm
    from ..experiment.config import Config
    from ..experiment.launch import FailedRun
    from .tuning import Tuning

RunsOrFolders = Run | str | Path | Iterable[Run | str | Path]


def compare(
    *what: RunsOrFolders,
    target: float | None = None,
    test: bool = False,
    against: str | None = None,
    metric: str | None = None,
) -> ComparisonTable:
    """Compare runs in one table; runs that differ only in their seed share a row.

    `what` are runs, run folders, folders of run folders, or lists of these. Rounds are counted to the accuracy
    `target`, from 0 to 1; without it, to fedavg's best. The result is a list of rows, which prints as a table.

    With `test=True` each method is tested against another, `against` (without it, fedavg), paired over the seeds that
    both have. `metric` is best_accuracy, final_accuracy, worst_clients_accuracy or test_loss. Each row then has its
    `test`, and the result's `tests` lists them. `latex()`, `markdown()` and `csv()` give the table for a paper.
    """
    return collect(what).table(target, test=test, against=against, metric=metric)


def report(*what: RunsOrFolders, out: str | Path = "report", title: str | None = None) -> Path:
    """Write one HTML page with tables and pictures of runs into a folder; return the page's path.

    `what` is as for `compare`.
    """
    return collect(what).report(out, title)


def collect(what: Iterable[RunsOrFolders]) -> Runs:
    """The runs, and those in the folders, each once and in this order."""
    runs, broken = list[Run](), dict[Path, str]()
    for each in what:
        if isinstance(each, Run):
            runs.append(each)
        elif isinstance(each, (str, Path)):
            whole, damaged = load_whole([each], check_run)
            runs, broken = runs + whole, broken | damaged
        elif isinstance(each, Iterable):
            inner = collect(each)
            runs, broken = runs + inner, broken | inner.broken
        else:
            raise StoreError(
                f"a run, a run folder or a list of them is compared, got {type(each).__name__}; "
                'give for example askew.compare("runs").'
            )
    if not runs:
        raise StoreError("there is no run to compare; give runs, or folders that askew.run(…, out=…) made.")
    return Runs({run.folder.resolve() if run.folder else id(run): run for run in runs}.values(), broken=broken)


def sweep(
    what: str | Path | Mapping[str, Any] | Config | Algorithm | type[Algorithm] | None = None,
    *,
    over: Mapping[str, Iterable[Any]] | None = None,
    seeds: int | Iterable[int] | None = None,
    out: str | Path | None = None,
    watch: Callable[[Run, Record | None], None] | None = None,
    track: Any = None,
    progress: bool = True,
    **settings: Any,
) -> Runs:
    """Train every combination of some settings' values and return the runs; on a GPU many at a time.

    `over` has lists of values by settings: dotted keys such as "local.lr", or the keywords of `askew.run`, such as
    "lr", "method" or "model"; a TOML file may hold them in its [sweep] table. `seeds` is a list of seeds, or how many
    from 0 on. Further keywords are those of `askew.run`. With `out` finished runs are read back and interrupted ones go
    on. `track` is as for `askew.run`, or a class or function that makes an object of your own for each run. A run that
    fails does not end the others: it is named by a warning and is in the result's `failed`; if all fail,
    the first error is raised.
    """
    from ..experiment.api import remark_run, sweep_configs, watched  # with torch, which takes seconds to load
    from ..experiment.hook_fault import users_fault
    from ..experiment.launch import FailedRun, run_each
    from ..experiment.trackers import tracking

    runs = Runs()
    configs = sweep_configs(what, over or {}, seeds, settings)
    names = [config.name() for config in configs]
    with tracking(track, names) as trackers, watched(configs, watch, progress) as on_round:
        for run in trackers.follow(run_each(configs, out, watch=trackers.beside(on_round))):
            if isinstance(run, FailedRun):
                fault = None if isinstance(run.error, AskewError) else users_fault(run.error)
                runs.failed.append(run._replace(error=fault) if fault else run)
            else:
                runs.append(run)
    if runs.failed and not runs:
        raise runs.failed[0].error
    for failed in runs.failed:
        warnings.warn(f"{failed.config.name()} failed: {failed.error}", Remark, stacklevel=2)
    for run in runs:
        remark_run(run)
    if len(runs) + len(runs.failed) < len(configs):
        warnings.warn(
            f"stopped in run {len(runs)} of {len(configs)}; call askew.sweep with out= again to go on.", Remark, 2
        )
    return runs


def tune(
    what: str | Path | Mapping[str, Any] | Config | Algorithm | type[Algorithm] | None = None,
    *,
    methods: Iterable[str] | str = (),
    over: Mapping[str, Iterable[Any]] | None = None,
    budget: str | None = None,
    seeds: int = 5,
    out: str | Path | None = None,
    watch: Callable[[Run, Record | None], None] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Tuning:
    """Find the method and the settings that suit a federation, and return their ranking.

    `methods` are names, or "all"; without them a short list. `over` has lists of values by settings, as for
    `askew.sweep`, which replace those that settings declare. `budget` is what all runs together may cost: "6000rounds",
    "10m" or "2GB"; without it, what a search with runs of all rounds needs. Methods are ranked at fresh seeds, the best
    three at `seeds` of them. The other keywords are those of `askew.run`. With `out` all runs are kept there, and an
    interrupted search goes on.

    The result's `winner` is a configuration for `askew.run`, `ranking` has a row for each method, `refused` the reasons
    of those that cannot run here; it prints as a table, and `plot()` draws the curves.
    """
    from ..experiment.api import WORDS, sweep_tables, watched  # with torch, which takes seconds to load
    from ..experiment.launch import run_each
    from ..experiment.tune import Budget, Tuner, TuneStopped, write_winner
    from .tuning import Tuning

    tables, spans = sweep_tables(what, settings)

    def launch(
        configs: Sequence[Config], folder: Path, title: str, note: Callable[[Run, Record | None], None]
    ) -> Iterator[Run | FailedRun]:
        def both(run: Run, record: Record | None) -> None:
            note(run, record)
            if watch is not None:
                watch(run, record)

        with watched(configs, both, progress) as on_round:
            yield from run_each(configs, folder, watch=on_round)

    chosen = [methods] if isinstance(methods, str) else list(methods)
    given = {WORDS.get(key, key): values for key, values in (over or {}).items()}
    given = {key: values if isinstance(values, str) else list(values) for key, values in given.items()}
    parsed = None if budget is None else Budget.parse(budget)
    with tempfile.TemporaryDirectory() if out is None else nullcontext(out) as folder:
        tuner = Tuner(tables, Path(folder), launch, methods=chosen, over=spans | given, budget=parsed, seeds=seeds)
        try:
            result = tuner.run()
        except TuneStopped:
            raise KeyboardInterrupt from None
        if out is not None:
            write_winner(result.standings[0], Path(out))
    for run in result.runs if out is None else ():
        run.folder = None  # it was a temporary one
    return Tuning(result, None if out is None else Path(out))
