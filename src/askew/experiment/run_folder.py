"""The folder of a run while it runs: where it is, whether it can be continued, and how it is begun or continued."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.files import read_tensors
from ..engine.choose import EngineChoice
from ..engine.distributed import SINGLE, ProcessGroup
from ..errors import StoreError
from . import checkpoint
from .build import BuiltRun
from .config import CHOICES, TABLES, Config, stored_tables
from .store import Run, intact_rounds, load, read_json, write_json, write_lines, write_text
from .toml import read_stored_toml, seal

# all files that a run stores, beside the folder of figures
FILES = (
    "run.toml",
    "rounds.jsonl",
    "run.json",
    "federation.json",
    "model.safetensors",
    "conformal.json",
    *checkpoint.FILES,
)


def run_folder(config: Config, out: str | Path | None) -> Path | None:
    """The folder of a configuration's run below `out`; None where nothing is to be stored."""
    return None if out is None else Path(out) / config.name()


def is_finished(folder: Path | None, stop_diverged: bool = True) -> bool:
    """Does this folder hold a finished run, or one that was stopped as it diverged and is not to go on?"""
    if folder is None or not ((folder / "run.toml").exists() and (folder / "model.safetensors").exists()):
        return False
    run = load(folder)
    return run.finished or (stop_diverged and run.over)


def stored_model(folder: Path) -> dict[str, Tensor]:
    """The tensors of a run's stored model."""
    path = folder / "model.safetensors"
    try:
        return read_tensors(path)[0]
    except (ValueError, OSError):
        raise StoreError(f"the stored model {path} cannot be read or is damaged; restore it, or use --fresh.") from None


def previous_engine(folder: Path | None) -> EngineChoice | None:
    """The engine of a run that is continued: another one's rounds would differ from those before by rounding."""
    facts = read_json(folder / "run.json") if folder and checkpoint.has_checkpoint(folder) else {}
    return EngineChoice(str(facts["engine"]), str(facts["reason"])) if {"engine", "reason"} <= facts.keys() else None


def check_same_config(folder: Path, config: Config) -> None:
    """Refuse a folder that holds a run of another configuration."""
    file = folder / "run.toml"
    if not file.exists():
        return
    tables = stored_tables(config)
    stored = with_new_settings(read_stored_toml(file), config, tables)
    if without_surroundings(stored) != without_surroundings(tables):
        raise StoreError(f"{folder} holds a run of another configuration; use another --out, or --fresh to replace it.")


def with_new_settings(stored: dict[str, Any], config: Config, tables: dict[str, Any]) -> dict[str, Any]:
    """Stored tables, with the defaults of settings that askew did not have when they were written."""
    filled = dict(stored)
    for name in (*CHOICES, *TABLES):
        if isinstance(stored.get(name), dict):
            new = {f.name: f.default for f in fields(getattr(config, name)) if f.name in tables[name]}
            filled[name] = new | stored[name]
    return filled


def without_surroundings(tables: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what changes no number of a round: where a plugin's file is, how many processes there
    are, when a run is stopped, and a hash that another one holds too.
    """
    without = {"engine": {"workers": None}, "evaluation": {"stop_diverged": None}, "model": {"structure": None}}
    parts = {name: tables[name] | none for name, none in without.items() if isinstance(tables.get(name), dict)}
    return tables | {"plugins": None} | parts


def clear_run(folder: Path) -> None:
    """Remove what a run stored in its folder, and nothing else."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "figures", ignore_errors=True)


def read_finished(folder: Path) -> Run:
    """A finished run, read back; what a process that was killed at its very end left undone is done."""
    run = load(folder)
    if run.facts.get("state") == "running":  # in the file: this process has the lock
        run.facts["state"] = "finished"
        write_json(folder / "run.json", run.facts)
    checkpoint.remove(folder)
    return run


def computed_with(built: BuiltRun) -> str:
    """What a run's numbers depend on in their last digits, beside its engine: kernels, torch and the processor."""
    device = built.space.device.type
    unit = torch.backends.cpu.get_cpu_capability() if device == "cpu" else str(built.facts["device"])
    return f"{built.kernels.identity()}, torch {torch.__version__} and {unit}"


def begin_or_resume(run: Run, built: BuiltRun, group: ProcessGroup = SINGLE) -> int:
    """Write a run's first files, or restore its server and rounds from a checkpoint; return the last round trained."""
    assert run.folder is not None
    folder, log = run.folder, run.folder / "rounds.jsonl"
    records, problem = intact_rounds(log)
    digest, used = built.config.digest(), computed_with(built)
    last = checkpoint.restore(folder, built.server, digest, len(records), used, problem)
    run.rounds = records[:last]
    for stage in built.server.recording:
        stage.resume(run.rounds)
    if (said := read_json(folder / "run.json").get("diverged")) and last:
        run.facts["diverged"] = said
    if not group.is_leader:
        return last
    write_text(folder / "run.toml", seal(built.config.toml()))
    write_lines(log, run.rounds)
    write_json(folder / "federation.json", run.federation)
    write_json(folder / "run.json", run.facts)
    return last
