"""The folder of a run while it runs: where it is, whether it can be continued, and how it is begun or continued."""

from __future__ import annotations

import hashlib
import shutil
import sys
from contextlib import suppress
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.files import read_tensors, tensors_sha256
from ..data.federation import Federation
from ..engine.choose import EngineChoice
from ..engine.process_group import SINGLE, ProcessGroup
from ..errors import StoreError
from . import checkpoint
from .build import BuildCache, BuiltRun, device_of
from .config import CHOICES, OPTIONAL_TABLES, TABLES, Config, Evaluation, stored_tables
from .folder_lock import explain_write_errors
from .plugins import LOADED, PLUGIN_PREFIX, PLUGINS, TEXT
from .store import (
    DIVERGED,
    STOPS,
    TRACKING,
    Run,
    intact_rounds,
    load,
    read_json,
    write_atomic,
    write_json,
    write_lines,
    write_text,
)
from .toml import read_stored_toml, seal

COMPARED_CLIENTS = 1000  # clients whose samples are compared, where clients make their own

# all files that a run stores, beside its end and the folders of figures and plugins
FILES = (
    "run.toml",
    "rounds.jsonl",
    "run.json",
    "federation.json",
    "model.safetensors",
    "conformal.json",
    TRACKING,
    *checkpoint.FILES,
)


def run_folder(config: Config, out: str | Path | None) -> Path | None:
    """The folder of a configuration's run below `out`; None where nothing is to be stored."""
    return None if out is None else Path(out) / config.name()


def is_finished(folder: Path | None, settings: Evaluation | None = None) -> bool:
    """Does this folder hold a finished run, or one that was stopped early and is not to go on by these settings?"""
    if folder is None or not ((folder / "run.toml").exists() and (folder / "model.safetensors").exists()):
        return False
    run = load(folder)
    if run.finished or not run.over or settings is None:
        return run.over
    if run.facts["state"] == DIVERGED:
        return settings.stop_diverged
    return bool(settings.stop_at) and (run.best_accuracy or 0.0) >= settings.stop_at


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
    """Refuse a folder that holds a run of another configuration, or a finished one that has lost a file."""
    file = folder / "run.toml"
    check_complete(folder)
    if not file.exists():
        return
    tables = stored_tables(config)
    stored = with_new_settings(read_stored_toml(file), config, tables)
    if without_surroundings(stored) != without_surroundings(tables):
        raise StoreError(f"{folder} holds a run of another configuration; use another --out, or --fresh to replace it.")


def check_complete(folder: Path) -> None:
    """Refuse a finished run that has lost a file: to train it again would first remove the records that are left."""
    if read_json(folder / "run.json").get("state") != "finished":
        return
    lost = [name for name in ("run.toml", "model.safetensors") if not (folder / name).exists()]
    if lost:
        raise StoreError(
            f"{folder} holds a finished run that has lost its {' and '.join(lost)}; restore what is lost; or, to train "
            "it again, use --fresh or remove the folder."
        )


def with_new_settings(stored: dict[str, Any], config: Config, tables: dict[str, Any]) -> dict[str, Any]:
    """Stored tables, with the defaults of settings that askew did not have when they were written."""
    filled = dict(stored)
    for name in (*CHOICES, *TABLES, *OPTIONAL_TABLES):
        if isinstance(stored.get(name), dict) and name in tables:
            new = {f.name: f.default for f in fields(getattr(config, name)) if f.name in tables[name]}
            filled[name] = new | stored[name]
    return filled


def without_surroundings(tables: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what changes no number of a round: where a plugin's file is, how many processes there
    are, when a run is stopped, and a hash that another one holds too.
    """
    without = {"engine": {"workers": None}, "evaluation": dict.fromkeys(STOPS), "model": {"structure": None}}
    parts = {name: tables[name] | none for name, none in without.items() if isinstance(tables.get(name), dict)}
    return tables | {"plugins": None} | parts


def clear_run(folder: Path) -> None:
    """Remove what a run stored in its folder, and nothing else; its plugins stay, from which it may be started."""
    with explain_write_errors(folder):
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        checkpoint.remove_end(folder)
    shutil.rmtree(folder / "figures", ignore_errors=True)


def read_finished(folder: Path) -> Run:
    """A finished run, read back; what a process that was killed at its very end left undone is done."""
    run = load(folder)
    with suppress(OSError, StoreError):  # in a folder that is only read it stays undone
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


# plugins and own data -------------------------------------------------------------------------------------------


def keep_plugins(folder: Path, config: Config, facts: dict[str, Any]) -> tuple[str, ...]:
    """Copy a run's plugins, as they were loaded, into its folder; note whence in its facts; return the copies' paths.

    They are relative to the folder, which can be moved then.
    """
    entries: dict[str, dict[str, str]] = {}
    for path in map(Path, config.plugins):
        loaded = sys.modules.get(LOADED.get(path.resolve(), ""))
        text: bytes = loaded.__dict__[TEXT] if loaded else path.read_bytes()
        name, number = path.name, 1
        while name in entries:
            number += 1
            name = f"{path.stem}-{number}{path.suffix}"
        edited = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds") if path.exists() else ""
        entry = {"file": str(path.resolve()), "edited": edited} | origin_of_copy(path)
        entries[name] = entry | {"name": name, "sha256": hashlib.sha256(text).hexdigest()}
        (folder / PLUGINS).mkdir(exist_ok=True)
        write_atomic(folder / PLUGINS / name, text)
    if entries:
        facts["plugins"] = list(entries.values())
    return tuple(f"{PLUGINS}/{name}" for name in entries)


def origin_of_copy(path: Path) -> dict[str, str]:
    """Of a plugin that a run folder keeps, the file that it was taken from and when that was edited; else nothing."""
    if path.parent.name != PLUGINS:
        return {}
    entries = read_json(path.parent.parent / "run.json").get("plugins", ())
    return next(({k: e[k] for k in ("file", "edited")} for e in entries if e["name"] == path.name), {})


def reads_unseen_files(config: Config) -> bool:
    """May the data come from files that the configuration's name does not depend on? Then the samples are compared."""
    return type(config.data).__module__.startswith(PLUGIN_PREFIX) and not config.data.reads()


def data_hash(fed: Federation) -> str:
    """Sixteen letters that stand for the samples of a federation and for who holds them."""
    pool, places = fed.gather(range(min(fed.clients, COMPARED_CLIENTS)))
    held = [torch.from_numpy(np.concatenate([*places, fed.sizes]))]
    tensors = {str(n): tensor for n, tensor in enumerate([*pool, *fed.test, *held])}
    return tensors_sha256(tensors)[:16]


def check_same_data(folder: Path, before: str | None, now: str) -> None:
    """Refuse to take a run of other samples for this one."""
    if before not in (None, now):
        raise StoreError(
            f"the data have changed since {folder} was trained; use --fresh to train it again on what they are now, or "
            "another --out to keep it. (A class that returns its files from reads() makes another run of other data.)"
        )


def check_finished_data(folder: Path, config: Config) -> None:
    """Refuse a finished run whose plugin reads other samples now."""
    before = read_json(folder / "run.json").get("data")
    if before and reads_unseen_files(config):
        check_same_data(folder, before, data_hash(BuildCache().federation(config, device_of(config.engine.device))))


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
    before = read_json(folder / "run.json") if last else {}
    run.facts |= {key: before[key] for key in ("diverged", "draws", "extends") if key in before}
    if reads_unseen_files(built.config):
        run.facts["data"] = data_hash(built.fed)
        check_same_data(folder, before.get("data"), run.facts["data"])
    if not group.is_leader:
        return last
    kept = keep_plugins(folder, built.config, run.facts)
    write_text(folder / "run.toml", seal(replace(built.config, plugins=kept).toml()))
    write_lines(log, run.rounds)
    write_json(folder / "federation.json", run.federation)
    write_json(folder / "run.json", run.facts)
    return last
