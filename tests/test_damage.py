"""Random damage to everything that is read: the right result or one clear sentence, never a traceback.

Where a file holds a hash, damage must not change what is read. ASKEW_LONG=all tries many more damages.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import askew
from askew.cli.main import main
from askew.core.files import read_tensors, tensors_sha256
from askew.data import files
from askew.data.partition_file import FromFile
from askew.errors import AskewError, DataError, StoreWarning
from askew.experiment import checkpoint
from askew.experiment.build import build
from askew.experiment.config import Config, load_config
from askew.experiment.store import load, load_all
from askew.flower.client_state import AnswerLog, FileStore
from askew.flower.wire import Payload
from askew.models.weights import tensors_of_file
from askew.participation import Trace
from askew.report.page import check_run
from askew.reproduction.printed import read_printed
from askew.reproduction.results import ResultRow, read_results, write_results
from damages import LONG, TABLES, TIMES, Read, attack, damaged, kill_after, records


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a finished run and of one that was killed after its fourth round."""
    here = tmp_path_factory.mktemp("runs")
    folder = askew.run(TABLES, out=here / "finished").folder
    assert folder is not None
    return folder, kill_after(4, here / "killed")


def facts_of(folder: Path) -> object:
    """All that is read of a run folder."""
    run = load(folder)
    return run.config, run.rounds, run.facts, run.federation


@pytest.mark.parametrize("name", ["run.toml", "run.json", "rounds.jsonl", "federation.json"])
def test_a_finished_run(name: str, runs: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs[0], tmp_path / runs[0].name))
    refused = attack(folder / name, lambda path: facts_of(path.parent), facts_of(folder))
    assert refused > TIMES // 2


def test_the_commands_that_read_folders(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files without checksums, as older versions wrote them: what is read may be wrong, but there is no traceback."""
    good, bad = (Path(shutil.copytree(runs[0], tmp_path / name)) for name in ("good", "bad"))
    draw = random.Random(1)
    toml = (bad / "run.toml").read_bytes().partition(b"\n")[2]
    plain = {
        path: toml if path.name == "run.toml" else path.read_bytes().replace(b'"checksum"', b'"old"')
        for path in (bad / name for name in ("run.toml", "run.json", "rounds.jsonl", "federation.json"))
    }
    for path, content in plain.items():
        path.write_bytes(content)
    for _ in range(TIMES // 5 if LONG else 4):
        path = draw.choice([*plain])
        path.write_bytes(damaged(plain[path], draw))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            assert good in [run.folder for run in load_all([good, bad], check_run)]
        assert main(["compare", str(good), str(bad)]) == 0
        assert main(["show", str(bad)]) in (0, 2)
        assert "unexpected" not in capsys.readouterr().err
        path.write_bytes(plain[path])


def test_a_checkpoint_and_a_model(runs: tuple[Path, Path], tmp_path: Path) -> None:
    server, digest = build(Config.build(TABLES)).server, Config.build(TABLES).digest()

    def state() -> str:
        return tensors_sha256(checkpoint.tensors_of(server))

    def restore(path: Path) -> object:
        return checkpoint.restore(path.parent, server, digest, 4), state()

    folder = Path(shutil.copytree(runs[1], tmp_path / "killed"))
    (folder / checkpoint.PREVIOUS).unlink()
    right = restore(folder / checkpoint.FILE)
    assert attack(folder / checkpoint.FILE, restore, right) > TIMES // 2
    model = shutil.copy(runs[0] / "model.safetensors", tmp_path)
    hashed = lambda path: tensors_sha256(tensors_of_file(path))
    assert attack(Path(model), hashed, hashed(Path(model))) > TIMES // 2


@pytest.mark.skipif(not LONG, reason="takes minutes; ASKEW_LONG=all runs it")
def test_a_killed_run_goes_on_right_or_says_why(runs: tuple[Path, Path], tmp_path: Path) -> None:
    whole = records(load(runs[0]))
    draw, ended = random.Random(2), 0
    for n in range(100):
        out = tmp_path / str(n)
        folder = Path(shutil.copytree(runs[1], out / runs[1].name))
        path = draw.choice(sorted(p for p in folder.iterdir() if p.stat().st_size))
        path.write_bytes(damaged(path.read_bytes(), draw))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", StoreWarning)
                run = askew.run(TABLES, out=out)
        except AskewError:
            continue
        ended += 1
        assert records(run) == whole, path.name
        assert tensors_sha256(read_tensors(folder / "model.safetensors")[0]) == tensors_sha256(
            read_tensors(runs[0] / "model.safetensors")[0]
        )
    print(f"{ended} of 100 damaged runs ended with the right result, the others with a sentence")
    assert ended


def test_results(tmp_path: Path) -> None:
    row = ResultRow("d1", "toy/table", "full", "case", "FedAvg", "", 0, "best", "0.5", "cpu", "0", "askew …")
    (path,) = write_results(
        tmp_path, [row._replace(seed=n, metric=m, value=f"0.{n}") for n in range(9) for m in ("best", "last", "loss")]
    )
    known = {r.run for r in read_results(tmp_path)}
    values = {r.key: r.value for r in read_results(tmp_path)}

    def read(path: Path) -> object:
        """The values of the runs that are read, and the right ones of those that are left out."""
        rows = [r for r in read_results(path.parent) if r.run in known]
        found = {r.run for r in rows}
        return {key: value for key, value in values.items() if key[:2] not in found} | {r.key: r.value for r in rows}

    attack(path, read, values)


def test_files_of_the_user(tmp_path: Path) -> None:
    """Configurations, traces, weights and printed numbers hold no hash: others may be read, or a sentence is given."""
    toml, trace, array = tmp_path / "c.toml", tmp_path / "t.json", tmp_path / "t.npy"
    toml.write_text(Config.build(TABLES).toml())
    trace.write_text(str([[n % 10, (n + 3) % 10] for n in range(40)]))
    np.save(array, np.eye(10, dtype=bool))
    weights, printed = tmp_path / "w.pt", tmp_path / "printed.csv"
    torch.save({"out.weight": torch.ones(10, 64), "out.bias": torch.zeros(10)}, weights)
    shutil.copy(next(Path("papers").glob("*/printed.csv")), printed)
    reads: dict[Path, Read] = {
        toml: load_config,
        trace: lambda path: Trace(path=str(path)).rows(10),
        array: lambda path: Trace(path=str(path)).rows(10),
        weights: tensors_of_file,
        printed: lambda path: read_printed(path.parent),
    }
    for path, read in reads.items():
        attack(path, read)


def test_partitions(tmp_path: Path) -> None:
    lists, owners = tmp_path / "p.json", tmp_path / "p.npy"
    lists.write_text(str([[n, n + 10] for n in range(10)]))
    np.save(owners, np.arange(20) % 10)
    for path in (lists, owners):
        attack(path, lambda path: FromFile(path=str(path), clients=10).split(np.zeros(20), 0))
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(DataError, match="no regular file"):
            FromFile(path=str(path)).split(np.zeros(20), 0)


def test_files_of_a_client(tmp_path: Path) -> None:
    """Its state, and its answers: a client must never send other bytes than it did before."""
    state, answers = FileStore(tmp_path / "state.safetensors"), tmp_path / "answers.safetensors"
    state.write({"3.c": torch.arange(50.0)})
    attack(state.path, lambda path: state.read()["3.c"].tolist(), state.read()["3.c"].tolist())
    AnswerLog(answers, 1, True).add("start", 3, "train", "hash", Payload({"loss": 0.5}, {"up": torch.arange(50.0)}))

    def read(path: Path) -> object:
        reply = AnswerLog(path, 1, True).find("start", 3, "train", "hash")
        return None if reply is None else (reply.numbers, reply.tensors["up"].tolist())

    assert attack(answers, read, read(answers)) > TIMES // 2


def test_decoded_datasets_are_hashed_once_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hashed = tmp_path / "cache.safetensors", list[int]()
    files.write_cache(path, {"x": torch.arange(100.0)}, "stamp")
    monkeypatch.setattr(files, "CHECKED", set())
    monkeypatch.setattr(files, "tensors_sha256", lambda tensors: hashed.append(1) or tensors_sha256(tensors))
    read = lambda: files.read_cache(path, "stamp") is not None
    assert read() and read() and len(hashed) == 2  # just written: another write in this tick would look the same
    os.utime(path, ns=(0, 0))
    assert read() and read() and len(hashed) == 3
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not read() and len(hashed) == 4


def test_decoded_datasets(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    files.write_cache(path, {"x": torch.arange(100.0), "y": torch.arange(9)}, "stamp")

    def read(path: Path) -> object:
        tensors = files.read_cache(path, "stamp")
        return "decoded again" if tensors is None else tensors_sha256(tensors)

    right = read(path)
    attack(path, lambda path: right if read(path) == "decoded again" else read(path), right)
