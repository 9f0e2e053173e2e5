"""How a run was computed: commit, hash of the source, torch, device, precision and the like, as one line of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import StoreError
from ..experiment.config import Config
from ..experiment.store import Run
from ..experiment.toml import text_hash
from .digests import changed_settings

NOT_RECORDED = "not recorded"  # of what results of older versions do not say


class Provenance(NamedTuple):
    """How a run was computed; what was not recorded is None."""

    commit: str | None = None  # of the checkout, with "+" where files were changed
    source: str | None = None  # a hash of askew's own files
    torch: str | None = None
    device: str | None = None
    dtype: str | None = None
    compiled: bool | None = None
    engine: str | None = None
    together: int | None = None  # runs that were trained side by side
    date: str | None = None  # on which the results were stored
    config: Mapping[str, Any] | None = None  # as `papers.changed_settings` writes it


def provenance_text(config: Config, run: Run, whole: bool = True) -> str:
    """How a finished run was computed, as one line of JSON; if not whole, without the configuration."""
    engine = config.engine
    made = Provenance(
        commit=source_commit() or None,
        source=source_hash(),
        torch=str(run.facts["torch"]) if "torch" in run.facts else None,
        device=str(run.facts.get("device", "unknown")),
        dtype=engine.dtype,
        compiled=engine.compile,
        engine=str(run.facts["engine"]) if "engine" in run.facts else None,
        together=int(run.facts["together"]) if "together" in run.facts else None,
        date=datetime.now(UTC).date().isoformat(),
        config=changed_settings(config) if whole else None,
    )
    known = {name: value for name, value in made._asdict().items() if value is not None}
    return json.dumps(known, separators=(",", ":"), ensure_ascii=False)


def parse_provenance(text: str) -> Provenance:
    """What a stored line says; nothing is known where there is none."""
    try:
        page = json.loads(text) if text else {}
        return Provenance(**{name: page.get(name) for name in Provenance._fields})
    except (ValueError, AttributeError) as e:
        raise StoreError(
            f"{text[:60]!r} does not say how a run was computed ({e}); restore the file, or run again."
        ) from None


@cache
def source_commit() -> str:
    """The commit of the checkout that askew runs from, with "+" where its files were changed; empty elsewhere."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return ""
    ask = ("git", "-C", str(root))
    try:
        answers = [
            subprocess.run([*ask, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", "src"))
        ]
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of somebody else
        return ""
    return answers[0][:12] + "+" * bool(answers[1])


@cache
def source_hash() -> str:
    """A hash of all files of askew's source, which distinguishes versions where there is no commit."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for path in root.rglob("*.py"))
    return text_hash("\n".join(f"{path.relative_to(root).as_posix()}\n{path.read_text('utf-8')}" for path in files))
