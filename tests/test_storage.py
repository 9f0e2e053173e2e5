"""What is stored survives damage, kills, full disks and strangers' folders, or one sentence says what is wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import askew
from askew.cli.main import main
from askew.core.bank import Bank
from askew.engine.process_group import create_shared_file
from askew.errors import ConfigError, DiskFull, EngineError, ModelError, StoreError, StoreWarning
from askew.experiment import checkpoint, process_pool, store
from askew.experiment.build import build
from askew.experiment.config import CHOICES, Config, load_config
from askew.experiment.conformal import conformal
from askew.experiment.extend import end_file
from askew.experiment.folder_lock import is_locked, lock_folder
from askew.experiment.launch import FailedRun, configs_message, run_config, run_each
from askew.experiment.plugins import PLUGIN_PREFIX
from askew.experiment.run_folder import stored_model
from askew.experiment.store import load, load_all, read_json, read_rounds, write_json, write_lines
from askew.experiment.toml import seal
from askew.experiment.workers import failure_error, failure_message
from askew.flower.client_state import FileStore
from askew.kernels.interface import Kernels
from askew.report.page import check_run
from askew.reproduction import reproduce, results
from askew.reproduction.results import ResultRow, read_results, write_results
from damages import TABLES, kill_after, records


def same(one: askew.Run, other: askew.Run) -> bool:
    """Have two runs the same records and the same model, bit by bit?"""
    models = [run.model or stored_model(run.folder or Path()) for run in (one, other)]
    return records(one) == records(other) and all(torch.equal(t, models[1][n]) for n, t in models[0].items())


@pytest.fixture(scope="module")
def whole() -> askew.Run:
    return askew.run(TABLES)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = askew.run(TABLES, out=tmp_path_factory.mktemp("finished")).folder
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kill_after(4, tmp_path_factory.mktemp("killed"))


def copied(folder: Path, to: Path) -> Path:
    """A copy of a run folder, below another folder."""
    return Path(shutil.copytree(folder, to / folder.name))


def flip(path: Path, at: int | None = None) -> None:
    """Flip one bit of a file, in its middle if not told otherwise."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 4
    path.write_bytes(content)


# damage ---------------------------------------------------------------------------------------------------------


def test_no_flipped_bit_of_a_checkpoint_is_read(killed: Path, tmp_path: Path) -> None:
    server, digest = build(Config.build(TABLES)).server, Config.build(TABLES).digest()
    path = copied(killed, tmp_path) / checkpoint.FILE
    content, draw = path.read_bytes(), random.Random(0)
    for place in [*range(0, 800, 40), *draw.sample(range(len(content)), 40)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError):
            checkpoint.read(path, server, digest)
    path.write_bytes(content)
    assert checkpoint.read(path, server, digest).round == 4


def test_a_damaged_checkpoint_is_named_and_the_one_before_gives_the_same_run(
    killed: Path, whole: askew.Run, tmp_path: Path
) -> None:
    folder = copied(killed, tmp_path)
    assert {p.name for p in folder.glob("checkpoint*")} == {checkpoint.FILE, checkpoint.PREVIOUS}
    flip(folder / checkpoint.FILE)
    with pytest.warns(StoreWarning, match=r"checkpoint\.safetensors is damaged.*the checkpoint before it, of round 3"):
        again = askew.run(TABLES, out=tmp_path)
    assert same(again, whole) and not list(folder.glob("checkpoint*"))


def test_two_damaged_checkpoints_are_refused_and_a_missing_newest_is_not(
    killed: Path, whole: askew.Run, tmp_path: Path
) -> None:
    folder = copied(killed, tmp_path)
    before = (folder / checkpoint.PREVIOUS).read_bytes()
    for name in (checkpoint.FILE, checkpoint.PREVIOUS):
        flip(folder / name)
    with pytest.raises(StoreError, match=r"checkpoint\.safetensors is damaged.*use --fresh"):
        askew.run(TABLES, out=tmp_path)
    (folder / checkpoint.FILE).unlink()  # as a kill between two renames leaves it
    (folder / checkpoint.PREVIOUS).write_bytes(before)
    assert same(askew.run(TABLES, out=tmp_path), whole)


def test_a_damaged_record_costs_the_rounds_after_it_and_changes_none(
    killed: Path, whole: askew.Run, tmp_path: Path
) -> None:
    folder = copied(killed, tmp_path)
    log = folder / "rounds.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:3], lines[3].replace('"dropped": 0', '"dropped": 1')]))
    with pytest.raises(StoreError, match=r"rounds\.jsonl, line 4 is not the record of round 4"):
        load(folder)
    with pytest.warns(StoreWarning, match=r"line 4 is not the record.*checkpoint before it, of round 3"):
        again = askew.run(TABLES, out=tmp_path)
    assert same(again, whole)


def test_old_folders_without_checksums_load_and_go_on(killed: Path, whole: askew.Run, tmp_path: Path) -> None:
    folder = copied(killed, tmp_path)
    (folder / "run.toml").write_text((folder / "run.toml").read_text().partition("\n")[2])
    plain = [json.dumps(record) + "\n" for record in read_rounds(folder / "rounds.jsonl")]
    (folder / "rounds.jsonl").write_text("".join(plain))
    for name in ("run.json", "federation.json"):
        (folder / name).write_text(json.dumps(read_json(folder / name)))
    (folder / checkpoint.PREVIOUS).unlink()
    from safetensors.torch import save_file

    tensors, about = checkpoint.read_tensors(folder / checkpoint.FILE)
    del about["computed_with"]
    save_file({n: t.clone() for n, t in tensors.items()}, folder / checkpoint.FILE, metadata=about)
    assert len(load(folder).rounds) == 4
    assert same(askew.run(TABLES, out=tmp_path), whole)
    log = (folder / "rounds.jsonl").read_text().splitlines()
    assert all('"checksum"' in line for line in log)  # all lines, also the old ones


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("run.json", lambda text: text.replace('"parameters": 650', '"parameters": 651')),
        ("federation.json", lambda text: text.replace("[", "[1", 1)),
        ("rounds.jsonl", lambda text: text.replace('"round": 2', '"round": 2, "x": 0', 1)),
        ("rounds.jsonl", lambda text: "".join(text.splitlines(keepends=True)[:-1])),
        ("rounds.jsonl", lambda text: text[:-3]),
        ("run.toml", lambda text: text.replace("clients = 10", "clients = 11")),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_compared(
    name: str,
    change: Callable[[str], str],
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good, bad = copied(finished, tmp_path / "good"), copied(finished, tmp_path / "bad")
    text = (bad / name).read_text()
    assert change(text) != text
    (bad / name).write_text(change(text))
    assert main(["show", str(bad)]) == 2
    err = capsys.readouterr().err
    assert name in err and err.count("\n") == 1
    assert main(["compare", "--json", str(good), str(bad)]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 1 and name in err and err.startswith("warning: a run is left out: ")


def test_fields_of_other_types_are_left_out_too_where_there_is_no_checksum(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = copied(finished, tmp_path / "good"), copied(finished, tmp_path / "bad")
    plain = (bad / "run.toml").read_text().partition("\n")[2]
    record = read_rounds(bad / "rounds.jsonl")
    changes: list[Callable[[], object]] = [
        lambda: (bad / "run.toml").write_text(seal(plain.replace("seed = 0", "seed = [0]"))),
        lambda: write_lines(bad / "rounds.jsonl", [r | {"seconds": "x"} for r in record]),
        lambda: write_lines(bad / "rounds.jsonl", [r | {"participants": 3} for r in record]),
        lambda: write_lines(bad / "rounds.jsonl", [{"round": r["round"]} for r in record]),
        lambda: write_json(bad / "federation.json", {"clients": "many"}),
    ]
    for change in changes:
        before = {path: path.read_bytes() for path in bad.iterdir()}
        change()
        with pytest.warns(StoreWarning, match="a run is left out: .*bad"):
            assert [run.folder for run in load_all([good, bad], check_run)] == [good]  # as `askew report`
        assert main(["compare", str(good), str(bad)]) == 0
        assert main(["show", str(bad)]) in (0, 2)
        assert "unexpected" not in capsys.readouterr().err
        for path, content in before.items():
            path.write_bytes(content)


def test_a_damaged_model_is_not_measured_and_not_trained_from(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    flip(folder / "model.safetensors", -5)
    with pytest.raises(StoreError, match=r"model\.safetensors cannot be read or is damaged"):
        stored_model(folder)
    with pytest.raises(StoreError, match=r"model\.safetensors cannot be read or is damaged"):
        conformal([load(folder)])


def test_a_damaged_state_of_a_client_is_refused(tmp_path: Path) -> None:
    state = FileStore(tmp_path / "client.safetensors")
    state.write({"3.c": torch.arange(5.0)})
    assert torch.equal(state.read()["3.c"], torch.arange(5.0))
    flip(tmp_path / "client.safetensors", -2)
    with pytest.raises(StoreError, match="is damaged"):
        state.read()


@pytest.mark.parametrize("name", ["run.toml", "model.safetensors"])
def test_a_finished_run_that_lost_a_file_is_not_trained_over(name: str, finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    records = (folder / "rounds.jsonl").read_bytes()
    (folder / name).unlink()
    with pytest.raises(StoreError, match=rf"a finished run that has lost its {name}; restore .*--fresh"):
        run_config(Config.build(TABLES), tmp_path)
    assert (folder / "rounds.jsonl").read_bytes() == records
    if name == "run.toml":
        with pytest.raises(StoreError, match=r"holds a run, but it has no run\.toml"):
            load(folder)
    assert run_config(Config.build(TABLES), tmp_path, fresh=True).finished and (folder / name).exists()


def test_a_record_that_is_nested_too_deeply_is_damaged(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    (folder / "rounds.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(StoreError, match=r"rounds\.jsonl, line 1 is not the record of round 1"):
        load(folder)


# folders that go, and folders that are only read ---------------------------------------------------------------


def test_a_folder_removed_during_a_run_ends_that_run_alone(tmp_path: Path) -> None:
    def remove(run: askew.Run, record: dict[str, object] | None) -> None:
        if record and record["round"] == 2 and run.config["seed"] == 0:
            shutil.rmtree(run.folder or "")

    configs = [Config.build({**TABLES, "seed": seed}) for seed in (0, 1)]
    failed, whole = run_each(configs, tmp_path, watch=remove)
    assert isinstance(failed, FailedRun) and isinstance(whole, askew.Run) and whole.finished
    assert isinstance(failed.error, StoreError) and "\n" not in str(failed.error)
    assert "rounds.jsonl: No such file or directory; if its folder was removed or renamed" in str(failed.error)


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a medium that is only read: nothing is opened for writing, made or removed."""
    opening = os.open

    def open_to_read(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opening(path, flags, *more, **options)

    def refuse(path: Any, *more: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "open", open_to_read)
    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)


@pytest.mark.parametrize("lock", [True, False], ids=["with its lock", "without"])
def test_a_finished_run_is_read_back_where_nothing_can_be_written(
    lock: bool, finished: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = copied(finished, tmp_path)
    (folder / ".run.json.abc_12").touch()
    write_json(folder / "run.json", read_json(folder / "run.json") | {"state": "running"})  # killed at its very end
    if not lock:
        (folder / ".lock").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    request.getfixturevalue("read_only")
    with lock_folder(folder):  # somebody else who reads it
        run = askew.run(TABLES, out=tmp_path)
    assert run.finished and run.facts["state"] == "finished"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for seed, fresh in ((0, True), (1, False)):
        with pytest.raises(StoreError, match=r"cannot write .*Read-only file system; name a folder you can write to"):
            run_config(Config.build({**TABLES, "seed": seed}), tmp_path, fresh=fresh)


def test_whoever_writes_a_run_is_alone_also_where_others_may_only_read(
    finished: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = copied(finished, tmp_path)
    with lock_folder(folder):
        request.getfixturevalue("read_only")
        with pytest.raises(StoreError, match="another process is writing"):
            askew.run(TABLES, out=tmp_path)


def test_folders_that_may_not_be_read_are_named(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, scandir, listdir = copied(finished, tmp_path / "runs" / "mine"), os.scandir, os.listdir

    def refusing(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(path: Any) -> Any:
            if Path(path) == secret:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path)

        return call

    monkeypatch.setattr(os, "scandir", refusing(scandir))
    monkeypatch.setattr(os, "listdir", refusing(listdir))
    for folder in (tmp_path / "runs", secret):
        assert main(["compare", str(folder)]) == 2
        assert capsys.readouterr().err.startswith(f"error: cannot read {secret}: Permission denied; ")
    copied(finished, tmp_path / "runs" / "open")
    assert main(["compare", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().err.startswith(f"warning: a run is left out: cannot read {secret}: Permission denied; ")


def test_links_to_run_folders(finished: Path, whole: askew.Run, tmp_path: Path, capsys: Any) -> None:
    name, real = finished.name, tmp_path / "real"
    (tmp_path / "runs").mkdir()
    real.mkdir()
    (tmp_path / "runs" / name).symlink_to(real)
    with pytest.raises(ConfigError, match="why"), lock_folder(tmp_path / "runs" / name):
        raise ConfigError("why")  # which no link that cannot be removed may hide
    assert same(askew.run(TABLES, out=tmp_path / "runs"), whole) and (real / "model.safetensors").exists()
    (tmp_path / "runs" / "itself").symlink_to("itself")
    (tmp_path / "runs" / "nowhere").symlink_to("nothing")
    assert main(["compare", "--json", str(tmp_path / "runs"), str(real)]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_names_that_are_not_utf8(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = os.fsdecode(b"odd\xff")
    folder = copied(finished, tmp_path / odd)
    assert main(["report", str(folder.parent), "--out", str(tmp_path / "page"), "--title", odd]) == 0
    assert "odd?" in (tmp_path / "page" / "index.html").read_text()
    assert main(["compare", str(folder.parent), "--json"]) == 0
    capsys.readouterr()
    (tmp_path / f"{odd}.py").write_text("import askew\n")
    for wrong in (["--out", str(tmp_path / odd)], ["--plugin", str(tmp_path / f"{odd}.py")]):
        assert main(["run", "--quiet", *wrong]) == 2
        err = capsys.readouterr().err
        assert "not in UTF-8" in err and err.count("\n") == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# what kills leave -----------------------------------------------------------------------------------------------


def test_what_killed_processes_left_is_removed_at_the_next_start(
    killed: Path, whole: askew.Run, tmp_path: Path
) -> None:
    folder = copied(killed, tmp_path)
    kept = folder / ".mine"
    own = (".checkpoint.safetensors.123", ".checkpoint-next.safetensors.ab_c1234", ".run.json.k3v9x0aa", ".tmpsq81kS")
    for name in (*own, ".mine"):
        (folder / name).write_bytes(b"part")
    assert same(askew.run(TABLES, out=tmp_path), whole)
    assert {p.name for p in folder.iterdir()} - {"run.toml", "run.json", "rounds.jsonl", "federation.json"} == {
        "model.safetensors",
        end_file(Config.build(TABLES)),
        ".lock",
        ".mine",
    } and kept.read_bytes() == b"part"


def test_a_run_killed_between_its_last_two_writes_is_finished(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    write_json(folder / "run.json", read_json(folder / "run.json") | {"state": "running"})
    (folder / checkpoint.FILE).write_bytes(b"")
    assert load(folder).facts["state"] == "finished"
    with lock_folder(folder):
        assert load(folder).facts["state"] == "running"
    askew.run(TABLES, out=tmp_path)
    assert read_json(folder / "run.json")["state"] == "finished" and not (folder / checkpoint.FILE).exists()
    (folder / "model.safetensors").unlink()
    write_json(folder / "run.json", read_json(folder / "run.json") | {"state": "running"})
    assert load(folder).facts["state"] == "interrupted"


def test_shared_memory_never_has_a_name() -> None:
    before = {*Path("/dev/shm").iterdir()}
    file = create_shared_file(4096)
    assert file is not None and os.fstat(file.fileno()).st_nlink == 0
    assert not {path for path in {*Path("/dev/shm").iterdir()} - before if "askew" in path.name}
    file.close()


def test_records_reach_the_disk_before_a_checkpoint_that_counts_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        order.append(Path(f"/proc/self/fd/{handle}").resolve().name)
        sync(handle)

    def rename(source: Any, target: Any) -> None:
        order.append(f"renamed to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    folder = kill_after(2, tmp_path)
    saved = [n for n, what in enumerate(order) if what == f"renamed to {checkpoint.FILE}"]
    assert len(saved) == 2
    for n in saved:
        start = max((m for m in saved if m < n), default=0)
        assert "rounds.jsonl" in order[start:n]
    order.clear()
    askew.run(TABLES, out=tmp_path)
    assert order.index("renamed to model.safetensors") > order.index("rounds.jsonl")
    assert folder.exists()


# full disks -----------------------------------------------------------------------------------------------------


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """As on a full disk: what goes beyond so many bytes of a file is refused by the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_without_room_is_one_sentence_and_the_run_goes_on_later(whole: askew.Run, tmp_path: Path) -> None:
    with (
        no_file_above(16_000),
        pytest.raises(DiskFull, match=r"cannot write .*checkpoint.*File too large; .* as it had no checkpoint yet\.$"),
    ):
        askew.run(TABLES, out=tmp_path, save_every=0)
    assert not list(tmp_path.glob("*/.checkpoint*"))
    assert same(askew.run(TABLES, out=tmp_path), whole)


def test_what_a_run_loses_on_a_full_disk_is_told_as_it_is(killed: Path, finished: Path, tmp_path: Path) -> None:
    advice = {
        killed / "run.json": "start the run again: it goes on from its last checkpoint.",
        finished / "conformal.json": "try again.",
        tmp_path / "page.html": "try again.",
    }
    for path, sentence in advice.items():
        with pytest.raises(DiskFull) as told, store.explain_write_errors(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert str(told.value) == f"cannot write {path}: No space left on device; free some space and {sentence}"


@pytest.mark.parametrize("command", ["partition", "data describe"])
def test_a_picture_is_written_whole_or_not_at_all(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "skew.svg"
    with no_file_above(1000):
        assert main([*command.split(), "--out", str(picture)]) == 2
    assert capsys.readouterr().err.startswith(f"error: cannot write {picture}: ") and not list(tmp_path.iterdir())


def test_a_full_disk_ends_a_sweep_at_once(tmp_path: Path) -> None:
    configs = [Config.build({**TABLES, "seed": seed}) for seed in (0, 1)]
    with no_file_above(16_000), pytest.raises(DiskFull, match="it begins anew, as it had no checkpoint yet"):
        list(run_each(configs, tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    both = list(run_each(configs, tmp_path))
    assert all(isinstance(run, askew.Run) and run.finished for run in both)


def test_a_full_disk_ends_a_queue_and_the_work_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> Iterator[askew.Run]:
        raise DiskFull("no room")
        yield

    class Schedule:
        def parts(self) -> list[list[Config]]:
            return [[Config.build(TABLES)], [Config.build(TABLES)]]

    monkeypatch.setattr(reproduce, "run_all", full)
    with pytest.raises(DiskFull):
        schedule: Any = Schedule()
        list(reproduce.run_here(schedule, tmp_path, lambda run, record: None, lambda text: None, go_on=True))
    monkeypatch.setattr(process_pool, "run_all", full)
    monkeypatch.setattr(process_pool, "next_order", lambda: configs_message([Config.build(TABLES)]))
    sent: list[dict[str, Any]] = []
    with pytest.raises(DiskFull) as ended:
        process_pool.run_parts({"out": str(tmp_path), "processes": 2, "each": True}, sent.append)
    assert sent == [{"waits": True}]
    assert type(failure_error(failure_message(ended.value))) is DiskFull  # as its parent gets it


def test_mapped_state_takes_its_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    bank = Bank({"h": torch.zeros(1000)}, host_bytes=0)
    bank.write([1], {"h": torch.ones(1, 1000)})
    assert bank.bytes_by_place()["file"] and torch.equal(bank.read([1, 2])["h"].sum(1), torch.tensor([1000.0, 0.0]))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match=r"no room for client state on disk.*No space left.*the run goes on"):
        Bank({"h": torch.zeros(1000)}, host_bytes=0).write([1], {"h": torch.ones(1, 1000)})


# other kernels --------------------------------------------------------------------------------------------------


def test_going_on_with_other_kernels_is_told(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied(killed, tmp_path)
    monkeypatch.setattr(Kernels, "identity", lambda self: "other kernels")
    with pytest.warns(StoreWarning, match=r"rounds up to 4 were computed with .* goes on with other kernels, torch"):
        askew.run(TABLES, out=tmp_path)


# two at once ----------------------------------------------------------------------------------------------------


def result_row(writer: int, number: int) -> ResultRow:
    return ResultRow(f"d{writer}", "toy/table", "full", "c", "m", "", number, "best", "1", "cpu", "0", "askew")


def test_two_writers_of_results_lose_no_row(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        for number in range(12):
            write_results(tmp_path, [result_row(writer, number)])

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_results(tmp_path)) == 36


def test_damaged_results_of_a_run_are_named_and_left_out(tmp_path: Path) -> None:
    rows = [result_row(0, n)._replace(metric=metric) for n in range(3) for metric in ("best", "last")]
    (path,) = write_results(tmp_path, rows)
    assert read_results(tmp_path) == sorted(rows, key=lambda row: row.key)
    (tmp_path / f".{path.name}.left1234").write_text("part")
    path.write_text(path.read_text().replace("1,last,1,", "1,last,7,"))
    with pytest.warns(StoreWarning, match="the run d0 with seed 1 are damaged"):
        assert {row.seed for row in read_results(tmp_path)} == {0, 2}
    with pytest.warns(StoreWarning):
        write_results(tmp_path, rows[2:4])
    assert read_results(tmp_path) == sorted(rows, key=lambda row: row.key)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    (tmp_path / "broken.csv").write_text("nonsense\n")
    with pytest.warns(StoreWarning, match=r"results are left out: .*broken\.csv does not begin with"):
        assert len(read_results(tmp_path, leave_out=True)) == 6  # as `askew ledger` reads them
    (tmp_path / "broken.csv").unlink()
    old = [line for line in path.read_text().splitlines() if f",{results.CHECKSUM}," not in line]
    path.write_text("\n".join([*old, ""]))
    assert len(read_results(tmp_path)) == 6


# strangers' folders ---------------------------------------------------------------------------------------------


def test_a_lock_is_never_opened_through_a_link(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "runs" / "x"
    precious.write_text("precious")
    folder.mkdir(parents=True)
    (folder / ".lock").symlink_to(precious)
    with pytest.raises(StoreError, match=r"cannot write .*x"), lock_folder(folder):
        pass
    assert precious.read_text() == "precious" and not is_locked(folder)
    (folder / ".lock").unlink()
    (folder / ".lock").write_text("kept")
    with lock_folder(folder):
        assert (folder / ".lock").read_text() == "kept" and is_locked(folder)


def test_no_escape_sequence_of_a_file_reaches_the_terminal(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(finished, tmp_path)
    evil = "\x1b]0;mine\x07\x9b31m\u202e[/bold]"
    write_json(folder / "run.json", read_json(folder / "run.json") | {"remark": evil, "reason": evil, "device": evil})
    rounds = read_rounds(folder / "rounds.jsonl")
    write_lines(folder / "rounds.jsonl", [record | {evil: 1.0} for record in rounds])
    text = (folder / "run.toml").read_text().partition("\n")[2]
    (folder / "run.toml").write_text(seal(text.replace('name = "scaffold"', f"name = {json.dumps(evil)}")))
    for arguments in (["show"], ["show", "--json"], ["compare"], ["compare", "--json"], ["conformal"]):
        main([*arguments, str(folder)])
        out, err = capsys.readouterr()
        assert "mine" in out + err
        assert not any(sign in out + err for sign in "\x1b\x07\x9b\u202e")


def test_a_folder_runs_no_plugin_without_trust(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    witness, plugin = tmp_path / "witness", tmp_path / "own.py"
    plugin.write_text(
        "import askew\nfrom pathlib import Path\nfrom askew.algorithms import FedAvg\n"
        f"Path({str(witness)!r}).write_text('ran')\n"
        "@askew.register('strange')\nclass Strange(FedAvg):\n    pass\n"
    )
    run = ["run", "--quiet", "--plugin", str(plugin), "--out", str(tmp_path / "runs"), "--set", "rounds=1"]
    assert main([*run, "--set", "algorithm.name=strange", "--set", "model.name=softmax"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    for name in [name for name in sys.modules if name.startswith(PLUGIN_PREFIX)]:  # as in a new process
        monkeypatch.delitem(sys.modules, name)
    for registry in CHOICES.values():
        registry.members.pop("strange", None)
    witness.unlink()
    capsys.readouterr()
    for verb in ("show", "compare"):
        assert main([verb, str(folder)]) == 0
    assert main(["conformal", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "plugins/own.py" in err and "--trust" in err and not witness.exists()
    with pytest.raises(ConfigError, match="--trust"):
        conformal([load(folder)])
    assert main(["conformal", str(folder), "--trust"]) == 0 and witness.exists()


def test_devices_and_pipes_are_no_weights_traces_or_records(finished: Path, tmp_path: Path) -> None:
    tables = {"model": {"name": "softmax", "weights": "/dev/zero"}}
    with pytest.raises(ModelError, match="there is no weights file '/dev/zero'"):
        askew.run({**TABLES, **tables}, out=tmp_path / "runs")
    sparse = tmp_path / "sparse.pt"
    with sparse.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelError, match="far too large"):
        askew.run({**TABLES, "model": {"name": "softmax", "weights": str(sparse)}})
    os.mkfifo(tmp_path / "trace.json")
    with pytest.raises(askew.AskewError, match="no regular file"):
        askew.run({**TABLES, "participation": {"name": "trace", "path": str(tmp_path / "trace.json")}})
    folder = copied(finished, tmp_path)
    (folder / "rounds.jsonl").unlink()
    (folder / "rounds.jsonl").symlink_to("/dev/zero")
    with pytest.raises(StoreError, match="no regular file"):
        load(folder)
    (folder / "run.toml").unlink()
    os.mkfifo(folder / "run.toml")
    with pytest.raises(StoreError, match=r"cannot read .*run\.toml: it is no regular file"):
        askew.run(TABLES, out=tmp_path)
    with pytest.raises(StoreError, match=r"cannot read .*run\.toml: it is no regular file"):
        load(folder)


def test_a_copy_of_a_stored_configuration_may_be_changed(finished: Path, tmp_path: Path) -> None:
    text = (finished / "run.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("rounds = 6", "rounds = 7"))
    assert load_config(tmp_path / "mine.toml").rounds == 7
    folder = copied(finished, tmp_path)
    (folder / "run.toml").write_text(text.replace("rounds = 6", "rounds = 7"))
    with pytest.raises(StoreError, match="is not as askew wrote it"):
        load_config(folder / "run.toml")


def test_the_checksum_of_a_json_object_by_hand() -> None:
    import hashlib

    body = '{"round": 1, "loss": null'
    text = store.seal({"round": 1, "loss": float("nan")})
    assert text == f'{body}, "checksum": "{hashlib.sha256(body.encode()).hexdigest()[:16]}"}}'
    assert store.parse_sealed(text) == {"round": 1, "loss": None}
    assert store.parse_sealed(store.seal({}, indent=1)) == {}
    with pytest.raises(ValueError, match="no checksum"):
        store.parse_sealed('{"round": 1}', sealed=True)
