"""`askew.sweep`, `askew.compare` and `askew.report`: what the commands of these names do, from Python."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AlgorithmError, AskewError, Remark, StoreError
from ..experiment.store import Record, Run, load_whole
from .page import check_run
from .runs import ComparisonTable, Runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core.algorithm import Algorithm
    from ..experiment.config import Config

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
    progress: bool = True,
    **settings: Any,
) -> Runs:
    """Train every combination of some settings' values and return the runs; on a GPU many at a time.

    `over` has lists of values by settings: dotted keys such as "local.lr", or the keywords of `askew.run`, such as
    "lr", "method" or "model"; a TOML file may hold them in its [sweep] table. `seeds` is a list of seeds, or how many
    from 0 on. Further keywords are those of `askew.run`. With `out` finished runs are read back and interrupted ones go
    on. A run that fails does not end the others: it is named by a warning and is in the result's `failed`; if all fail,
    the first error is raised.
    """
    from ..experiment.api import remark_divergence, sweep_configs, watched  # with torch, which takes seconds to load
    from ..experiment.hook_fault import hook_fault
    from ..experiment.launch import FailedRun, run_each

    runs = Runs()
    configs = sweep_configs(what, over or {}, seeds, settings)
    with watched(configs, watch, progress) as on_round:
        for run in run_each(configs, out, watch=on_round):
            if isinstance(run, FailedRun):
                sentence = None if isinstance(run.error, AskewError) else hook_fault(run.error)
                runs.failed.append(run._replace(error=AlgorithmError(sentence)) if sentence else run)
            else:
                runs.append(run)
    if runs.failed and not runs:
        raise runs.failed[0].error
    for failed in runs.failed:
        warnings.warn(f"{failed.config.name()} failed: {failed.error}", Remark, stacklevel=2)
    for run in runs:
        remark_divergence(run)
    if len(runs) + len(runs.failed) < len(configs):
        warnings.warn(
            f"stopped in run {len(runs)} of {len(configs)}; call askew.sweep with out= again to go on.", Remark, 2
        )
    return runs
