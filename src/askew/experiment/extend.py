"""Longer runs that begin where a shorter one ended: the same settings with more rounds.

A finished run keeps the state after its last round. The folder of a longer run with the same settings is prepared from
it as if the run had been interrupted there, so that it goes on as an interrupted run does; the shorter run stays as
it is. This is done only where the first rounds do not depend on how many follow.
"""

from __future__ import annotations

import glob
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.files import read_tensors
from ..core.records import Record
from ..core.text import count_text
from ..engine.process_group import ProcessGroup
from ..engine.server import Server
from ..errors import StoreError, StoreWarning
from . import checkpoint
from .config import Config
from .divergence import divergence_sentence
from .store import load, to_json, write_json, write_lines

LARGEST_END = 256_000_000  # bytes of a state that is kept


def end_file(config: Config) -> str:
    """The name of the file with the end of a run: the same for runs that differ only in the number of rounds."""
    return checkpoint.END_FILES.replace("*", replace(config, rounds=1).digest())


def cannot_extend(config: Config) -> str:
    """Why a run of this configuration cannot begin where a shorter one ended; empty if it can."""
    schedule = config.local.schedule
    if schedule == "exponential":
        return ""
    return f'with local.schedule = "{schedule}" every learning rate depends on the number of rounds'


def keep_end(
    folder: Path, config: Config, server: Server, last: Record, group: ProcessGroup, computed_with: str
) -> None:
    """Store the state after the last round of a finished run, and its record as it is where rounds follow.

    All ranks must call this. Where a longer run cannot use the state, only the reason is stored.
    """
    tensors: dict[str, Tensor] = {}
    about = {"why": cannot_extend(config)}
    if not about["why"]:
        tensors, about = checkpoint.collect_state(server, config.rounds, config.digest(), group, computed_with)
        about |= {"last": to_json(last), "why": ""}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > LARGEST_END:
        tensors, about = {}, {"why": f"its last state, of {size / 1e6:,.0f} MB, was too large to be kept"}
    if group.is_leader:
        checkpoint.save_tensors(folder / end_file(config), tensors, about)


def stored_reason(folder: Path) -> str:
    """Why a longer run cannot begin where the finished run in this folder ended; empty if it can."""
    for file in folder.glob(checkpoint.END_FILES):
        return str(read_tensors(file)[1].get("why", ""))
    return "its last state was not kept"


def begin_at_end(folder: Path, config: Config) -> None:
    """Prepare a new run's folder from the longest shorter run beside it that has the same settings, if there is one."""
    if checkpoint.has_checkpoint(folder) or (folder / "model.safetensors").exists() or not config.simulated:
        return
    prefix = folder.name.rpartition("-")[0]
    others: dict[int, Path] = {}
    for file in sorted(folder.parent.glob(f"{glob.escape(prefix)}-*/{end_file(config)}")):
        try:
            run = load(file.parent)
        except StoreError:  # a damaged run is no beginning
            continue
        if run.finished and (file.parent / "model.safetensors").exists():  # which is written after the records
            others[len(run.rounds)] = file
    shorter = {rounds: file for rounds, file in others.items() if rounds < config.rounds}
    if shorter:
        copy_end(shorter[max(shorter)], folder, config)
    elif others and not cannot_extend(config):
        other = others[min(others)].parent
        warn(
            f"{other} holds the same run with {count_text(min(others), 'round')}, and begins with those asked for; "
            f"they are trained again, as the model after round {config.rounds} was not stored"
        )


def copy_end(file: Path, folder: Path, config: Config) -> None:
    """Prepare a folder as if its run had been interrupted where the shorter run with this file ended."""
    run = load(file.parent)
    done, all_rounds = len(run.rounds), "so all rounds are trained"
    try:
        tensors, about = read_tensors(file)
    except (ValueError, OSError):
        warn(f"{file} is damaged, {all_rounds}")
        return
    if about["why"]:
        warn(f"{file.parent} holds {count_text(done, 'round')} of the same settings, but {about['why']}, {all_rounds}")
        return
    records = [*run.rounds[:-1], json.loads(about["last"])]
    diverged = first_divergence(records, int(run.federation.get("classes", 0)), config)
    if diverged and config.evaluation.stop_diverged:  # it would have been stopped in the midst of them
        return
    facts: dict[str, Any] = {key: run.facts[key] for key in ("engine", "reason", "data") if key in run.facts}
    facts |= {"extends": run.name} | ({"diverged": diverged} if diverged else {})
    own = about["digest"].replace(replace(config, rounds=done).digest(), config.digest())
    write_lines(folder / "rounds.jsonl", records)
    write_json(folder / "run.json", facts)
    kept = {key: about[key] for key in ("round", "owners", "computed_with")}
    checkpoint.save_tensors(folder / checkpoint.FILE, tensors, kept | {"digest": own})


def first_divergence(records: Sequence[Record], classes: int, config: Config) -> str:
    """What a run of this configuration would have said when it diverged in these rounds; empty if it did not."""
    about = config.rounds, config.local.lr, config.evaluation.every
    sentences = (divergence_sentence(records[:n], classes, *about) for n in range(1, len(records) + 1))
    return next(filter(None, sentences), "")


def warn(sentence: str) -> None:
    """Say something about a run beside the one that is started."""
    warnings.warn(f"{sentence}.", StoreWarning, stacklevel=3)
