"""`askew watch`: what the page is sent, who may ask for it, and the page itself in a browser."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import closing
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

import askew
from askew.cli.main import main
from askew.errors import ConfigError, StoreWarning
from askew.experiment import toml
from askew.experiment.folder_lock import lock_folder
from askew.experiment.store import append_lines, load_all, load_whole, write_json, write_lines
from askew.report import page, views
from askew.report.columns import Columns, thin_out
from askew.report.figures import accuracy_picture
from askew.report.shell import LICENCE, STATIC
from askew.watch import folders, server
from askew.watch.folders import RunFolders, WatchedRun
from askew.watch.server import FILES, WatchServer
from browser import CHROMIUM, Browser

LABELS = [[6, 0], [0, 3], [1, 0], [0, 0]]


def record(number: int, **other: Any) -> dict[str, Any]:
    """The record of a round in which clients 0 and 1 took part."""
    sent = {"bytes_up": 10, "bytes_down": 30, "dropped": 0, "seconds": 0.5}
    return {"round": number, "participants": [0, 1], "accuracy": number / 10, "loss": 2.0 / number, **sent, **other}


def make_run(folder: Path, records: list[dict[str, Any]], state: str = "finished", **config: Any) -> Path:
    """A run folder with four clients."""
    tables = {table: {"name": "iid"} for table in ("data", "partition", "participation", "model")}
    whole = {"seed": 0, "rounds": len(records), "algorithm": {"name": "fedavg"}, "local": {"lr": 0.1}} | tables | config
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(toml.seal(toml.to_toml(whole)))
    write_json(folder / "run.json", {"state": state, "engine": "sequential"})
    federation = {"clients": 4, "classes": 2, "sizes": [6, 3, 1, 0], "samples": 10, "labels": LABELS}
    write_json(folder / "federation.json", federation)
    write_lines(folder / "rounds.jsonl", records)
    return folder


def read(folder: Path) -> WatchedRun:
    run = WatchedRun(0, folder, folder.name)
    assert run.refresh()
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two whole runs and a broken one."""
    make_run(tmp_path / "runs" / "first", [record(n) for n in (1, 2, 3)])
    make_run(tmp_path / "runs" / "second", [record(n) for n in (1, 2)], algorithm={"name": "scaffold"}, seed=7)
    broken = make_run(tmp_path / "runs" / "broken", [record(1), record(2)])
    (broken / "rounds.jsonl").write_text((broken / "rounds.jsonl").read_text().replace("0.1", "0.9"))
    return tmp_path / "runs"


@pytest.fixture
def served(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchServer]:
    monkeypatch.setattr(folders, "PAUSE", 0.02)
    monkeypatch.setattr(server, "REST", 0.02)
    with WatchServer(root) as watch:
        Thread(target=watch.serve_forever, args=(0.02,), daemon=True).start()
        yield watch
        watch.shutdown()


class Answer(NamedTuple):
    status: int
    headers: Message
    text: str


def request(watch: WatchServer, path: str, method: str = "GET", host: str | None = None) -> HTTPConnection:
    """A connection on which a request is sent as it stands."""
    connection = HTTPConnection("127.0.0.1", watch.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host if host is not None else f"127.0.0.1:{watch.server_port}")
    connection.endheaders()
    return connection


def ask(watch: WatchServer, path: str, method: str = "GET", host: str | None = None) -> Answer:
    """The answer to a request."""
    with closing(request(watch, path, method, host)) as connection:
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read().decode())


def ask_json(watch: WatchServer, name: str) -> Any:
    return json.loads(ask(watch, f"/{watch.token}/{name}").text)


# which folders ----------------------------------------------------------------------------------------------------


def test_a_report_and_the_page_look_for_runs_in_the_same_folders(root: Path) -> None:
    make_run(root / "study" / "third", [record(1)])
    make_run(root / "study" / "deeper" / "fourth", [record(1)])
    make_run(root / ".hidden" / "fifth", [record(1)])
    lost = make_run(root / "study" / "lost", [record(1)])
    (lost / "run.toml").unlink()
    watched = RunFolders(root)
    watched.look()
    states = {run.name: run.state for run in watched.runs}
    assert states == {
        "first": "finished",
        "second": "finished",
        "study/third": "finished",
        "broken": "broken",
        "study/lost": "broken",
    }
    with pytest.warns(StoreWarning, match="a run is left out"):
        whole, broken = load_whole([root])  # as `askew report` reads them
    assert {run.folder: "finished" for run in whole} | dict.fromkeys(broken, "broken") == {
        root / name: state for name, state in states.items()
    }


# what is sent -----------------------------------------------------------------------------------------------------


def test_clients_by_rounds_as_counted_by_hand(tmp_path: Path) -> None:
    late, refused = {"late answer": [2]}, {"update too large": [3], "second answer": [0]}
    rounds = [record(1), record(2, participants=[0], incidents=late), record(3, participants=[0], incidents=refused)]
    run = read(make_run(tmp_path / "run", rounds))
    sent = views.turns(run, [0, 0, 0, 0])
    used, missing, wrong = (
        [list(base64.b64decode(sent["cells"])[12 * k + 3 * client :][:3]) for client in range(4)] for k in range(3)
    )
    assert used == [[255, 255, 255], [255, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert missing == [[0, 0, 0], [0, 0, 0], [0, 255, 0], [0, 0, 0]]
    assert wrong == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 255]]
    part = views.turns(run, [2, 3, 2, 3])
    assert (part["window"], list(base64.b64decode(part["cells"]))) == (
        [2, 3, 2, 3],
        [0] * 4 + [255, 0, 0, 0] + [0, 0, 0, 255],
    )
    lost = "2 of 3 answers used; update too large: client 3; second answer: client 0; 0% of the data of this round lost"
    assert views.details(run)["incidents"][0] == (3, lost.replace("2 of 3", "1 of 2"))


def test_clients_that_could_not_be_asked_are_counted(tmp_path: Path) -> None:
    rounds = [record(1, unreachable=[3]), record(2, unreachable=[1, 3]), record(3)]
    sentence = "not connected or silent when a round began, 3 times: client 3 (2 times), client 1"
    assert views.details(read(make_run(tmp_path / "run", rounds)))["reasons"] == [sentence]


def test_many_rounds_share_a_cell(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", [record(n, participants=[0] if n > 2 else [0, 1, 3]) for n in (1, 2, 3, 4)]))
    cells = list(base64.b64decode(views.turns(run, detail=views.Detail(rounds=2, clients=2))["cells"]))
    assert cells == [255, 128, 128, 0] + [0] * 8  # of two clients in two rounds: 4, 2, 2 and 0 turns


def test_shares_of_turns_and_data_as_counted_by_hand(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", [record(1), record(2, participants=[0, 2])]))
    sent = views.shares(run)
    assert sent["x"] == [0, 10, 30, 60] and sent["y"] == [0, 25, 25, 50]
    assert sent["note"] == "1 of 4 clients took no turn so far; it holds 0% of the data."
    assert views.classes(run)["values"] == [6, 0, 1, 0, 0, 3, 0, 0]


def test_curves_by_round_byte_and_second_without_gaps() -> None:
    columns = Columns([record(1), record(2, accuracy=None), record(3, by={"a": 4, "b": True}, each=[5, 6])])
    assert columns.points("accuracy") == ([1, 3], [0.1, 0.3])
    assert columns.points("by.a") == ([3], [4]) and columns.points("each.1") == ([3], [6])
    assert "by.b" not in columns.numbers and columns.best == 0.3 and columns.totals == {"bytes": 120, "seconds": 1.5}


def test_a_thinned_curve_keeps_its_ends_and_peaks() -> None:
    y = [0.0] * 1000
    y[501], y[502] = 9.0, -9.0
    kept = thin_out(y, 20)
    assert len(kept) <= 22 and kept == sorted(kept) and (kept[0], kept[-1]) == (0, 999) and {501, 502} <= set(kept)


def test_accuracy_by_class_and_round_as_counted_by_hand(tmp_path: Path) -> None:
    accuracies = [{"0": 0.0, "1": 1.0, "2": None}, {"0": 0.5, "1": 0.5, "2": None}, {"0": 1.0, "1": 0.25, "2": 1.0}]
    rounds = [record(n, class_accuracy=table) for n, table in enumerate(accuracies, 1)]
    run = read(make_run(tmp_path / "run", [*rounds, record(4)]))
    sent = views.accuracy_by_class(run)
    assert (sent["classes"], sent["rounds"], sent["names"]) == (3, [1, 2, 3], ["0", "1", "2"])
    assert list(base64.b64decode(sent["cells"])) == [1, 128, 255, 255, 128, 64 + 1, 0, 0, 255]  # 1 + 254 a, 0: none
    assert views.curves(run)["by_class"] == {"0": 1.0, "1": 0.25, "2": 1.0}
    coarse = views.accuracy_by_class(run, views.Detail(rounds=1, classes=1))
    mean = (0 + 1 + 0.5 + 0.5 + 1 + 0.25 + 1) / 7
    assert list(base64.b64decode(coarse["cells"])) == [round(1 + 254 * mean)]
    assert views.accuracy_by_class(read(make_run(tmp_path / "plain", [record(1)])))["classes"] == 0


def test_curves_of_many_rounds_share_their_axes(tmp_path: Path) -> None:
    """Each curve keeps its own peaks, and its points have places in the rounds, bytes and seconds so far."""
    values = [0.1, 0.9, 0.2, 0.3, 0.1, 0.4, 0.2, 0.5]
    rounds = [record(n, accuracy=a, loss=1 - a if n % 2 else None) for n, a in enumerate(values, 1)]
    sent = views.curves(read(make_run(tmp_path / "run", rounds)), views.Detail(points=4))
    assert (sent["round"], sent["bytes"]) == ([1, 2, 3, 5, 7, 8], [40, 80, 120, 200, 280, 320])
    assert sent["seconds"] == [0.5, 1, 1.5, 2.5, 3.5, 4]
    accuracy, loss = sent["series"]
    assert (accuracy["at"], accuracy["y"]) == ([0, 1, 3, 5], [10, 90, 10, 50])
    assert (loss["at"], loss["y"]) == ([0, 2, 3, 4], [0.9, 0.8, 0.9, 0.8])
    assert sent["settings"]["seed"] == "0" and sent["settings"]["algorithm.name"] == "fedavg"


# folders that change ------------------------------------------------------------------------------------------------


def test_an_appended_record_alone_is_read_and_a_dead_run_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", [record(1)], "running", rounds=4)
    with lock_folder(folder):
        run = read(folder)
        assert (run.state, run.columns.count, run.refresh()) == ("running", 1, False)
        with monkeypatch.context() as patched:
            patched.setattr(WatchedRun, "_read_all", lambda run: pytest.fail("read as a whole"))
            append_lines(folder / "rounds.jsonl", [record(2), record(3)])
            assert run.refresh() and run.columns.points("accuracy")[1] == [0.1, 0.2, 0.3]
            with open(folder / "rounds.jsonl", "a") as file:
                file.write('{"round": 4, "parti')  # a line that is being written
            assert run.refresh() and run.columns.count == 3
    assert run.refresh() and run.state == "interrupted"
    (folder / "rounds.jsonl").write_text("nonsense\n")
    assert (
        run.refresh() and run.state == "broken" and "rounds.jsonl, line 1 is not the record of round 1" in run.problem
    )


def test_folders_inside_of_folders_come_and_go(tmp_path: Path) -> None:
    make_run(tmp_path / "sweep" / "one", [record(1)])
    watched = RunFolders(tmp_path)
    watched.look()
    version, changed = watched.changes(0, 0)
    assert [(run.name, run.state) for run in changed] == [("sweep/one", "finished")]
    make_run(tmp_path / "two", [record(1)])
    (tmp_path / "sweep").rename(tmp_path.parent / "elsewhere")
    for _ in range(folders.SLOW):
        watched.look()
    assert [(run.name, run.state) for run in watched.changes(version, 0)[1]] == [
        ("sweep/one", "gone"),
        ("two", "finished"),
    ]


def test_what_a_folder_holds_may_be_anything(tmp_path: Path) -> None:
    odd = make_run(tmp_path / "odd", [record(1)])
    write_json(odd / "federation.json", {"clients": 4, "sizes": "many"})
    assert read(odd).state == "broken" and "holds something that askew does not write" in read(odd).problem
    (odd / "run.toml").unlink()
    assert "it has no run.toml" in read(odd).problem and views.row(read(odd))["state"] == "broken"


# who may ask --------------------------------------------------------------------------------------------------------


def test_rows_and_broken_folders_as_they_are(served: WatchServer) -> None:
    rows: list[dict[str, Any]] = []
    while not rows or any(row["state"] == folders.READING for row in rows):
        rows = ask_json(served, "runs")["rows"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["first"]["accuracy"] == 0.3 and by_name["first"]["round"] == 3 and by_name["second"]["seed"] == 7
    assert (
        by_name["broken"]["state"] == "broken" and "line 1 is not the record of round 1" in by_name["broken"]["problem"]
    )
    ids = f"{by_name['first']['id']},{by_name['second']['id']}"
    curves = ask_json(served, f"curves?ids={ids}")
    assert [one["bytes"] for one in curves] == [[40, 80, 120], [40, 80]]
    assert [one["series"][0]["at"] for one in curves] == [None, None]


def test_an_event_comes_when_a_record_is_appended(served: WatchServer, root: Path) -> None:
    folder = make_run(root / "live", [record(1)], "running", rounds=9)
    with lock_folder(folder), closing(request(served, f"/{served.token}/events?since=0")) as connection:
        events = connection.getresponse()
        assert events.headers["Content-Type"] == "text/event-stream"
        seen, appended = 0, False
        while seen < 2:
            line = events.fp.readline().decode()
            for row in json.loads(line[6:])["rows"] if line.startswith("data: ") else ():
                seen = row.get("round", 0) if row["name"] == "live" else seen
            if seen == 1 and not appended:
                append_lines(folder / "rounds.jsonl", [record(2)])
                appended = True
        events.close()


def test_without_the_token_or_with_another_host_nothing_is_told(served: WatchServer) -> None:
    token, port = served.token, served.server_port
    assert served.server_address[0] == "127.0.0.1" and len(token) >= 32
    wrong = [
        "/",
        "/runs",
        f"/{token[:-1]}/",
        f"/{token}x/runs",
        f"/%20{token}/",
    ]
    refused = [ask(served, path) for path in wrong]
    refused += [
        ask(served, f"/{token}/runs", host=host) for host in ("", "foreign.test", f"foreign.test:{port}", "127.0.0.1")
    ]
    assert {answer.status for answer in refused} == {403}
    assert all(token not in answer.text for answer in refused)
    assert ask(served, f"/{token}/", host=f"localhost:{port}").status == 200


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("../../../../etc/passwd", "GET", 404),
        ("%2e%2e/%2e%2e/server.py", "GET", 404),
        ("static/../server.py", "GET", 404),
        ("turns?id=../first", "GET", 400),
        ("turns?id=-1", "GET", 400),
        ("turns?id=99", "GET", 400),
        ("turns?id=0&first=1e9", "GET", 400),
        ("curves?ids=0,x", "GET", 400),
        ("events?since=x", "GET", 400),
        ("runs", "POST", 501),
        ("runs", "DELETE", 501),
    ],
)
def test_requests_are_no_paths_and_change_nothing(
    served: WatchServer, root: Path, path: str, method: str, status: int
) -> None:
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*")}
    answer = ask(served, f"/{served.token}/{path}", method)
    assert answer.status == status and len(answer.text) < 200
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*")} == before


def test_nothing_is_inline_or_from_elsewhere(served: WatchServer) -> None:
    for name in FILES:
        answer = ask(served, f"/{served.token}/{name}")
        assert answer.status == 200 and answer.headers["X-Content-Type-Options"] == "nosniff"
        policy = answer.headers["Content-Security-Policy"]
        assert "unsafe" not in policy and "http" not in policy and "script-src 'self'" in policy
    shell = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|//", shell)
    own = "".join((STATIC / name).read_text() for name in ("page.js", "table.js", "axes.js", "heat.js", "source.js"))
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|import\(", own)
    assert {path.name for path in STATIC.iterdir()} == {file for file, _ in FILES.values()} | {LICENCE}


def test_what_cannot_be_watched_is_one_sentence(
    served: WatchServer, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(root / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot listen on port"):
        WatchServer(root, served.server_port)


# in a browser -------------------------------------------------------------------------------------------------------

NAMES = "[...document.querySelectorAll('#runs tbody tr:not(.space)')].map(tr => tr.children[1].textContent)"
LEGEND = "[...document.querySelectorAll('[data-panel=accuracy] .u-legend .u-label')].map(label => label.textContent)"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed")
def test_the_page_in_a_browser(
    served: WatchServer, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "draw_pictures", lambda groups: [accuracy_picture(groups)])  # the others take seconds
    browser = Browser(tmp_path / "profile")
    try:
        use_page(browser, served)
        browser.see(400, 800)
        browser.wait("innerWidth === 400 && document.documentElement.scrollWidth <= 400")
        assert browser.value(
            "[...document.querySelectorAll('figure')].every(f => f.getBoundingClientRect().right <= 400)"
        )
        train_beside(browser, root)
        open_report(browser, root, tmp_path / "report")
        assert browser.errors == []
        port = served.server_port
        for address in (f"http://foreign.test:{port}/{served.token}/", f"http://127.0.0.1:{port}/{'x' * 32}/"):
            browser.open(address)
            browser.wait(
                "document.body && document.body.textContent.startsWith('Use the address that askew watch printed')"
            )
    finally:
        browser.close()


def use_page(browser: Browser, served: WatchServer) -> None:
    """Overlay two runs, sort, filter, and see a broken folder."""
    browser.see(1280, 900)
    browser.open(served.url)
    browser.wait(f"({LEGEND}).length === 3")  # the round and two runs, which are chosen at first
    assert set(browser.value(LEGEND)[1:]) == {"first", "second"}
    assert browser.value("page.charts.get('accuracy').plot.data.map(column => column.length)") == [3, 3, 3]
    browser.wait("document.getElementById('turns').height > 100 && page.turns.cells.length > 0")
    assert "line 1 is not the record of round 1" in browser.value("document.getElementById('broken').textContent")
    for ascending in (True, False):
        browser.value("document.querySelector('th[data-key=method] button').click()")
        methods = browser.value("table.shown.map(row => row.method).filter(Boolean)")
        assert methods == sorted(methods, reverse=not ascending)
    assert browser.value(NAMES)[:2] == ["second", "first"]
    type_text = (
        "(text => { const f = document.getElementById('filter'); f.value = text; f.dispatchEvent(new Event('input')) })"
    )
    browser.value(f"{type_text}('SCAFF finished')")
    assert browser.value(NAMES) == ["second"] and "1 of 3" in browser.value(
        "document.getElementById('count').textContent"
    )
    browser.value(f"{type_text}('')")
    assert "algorithm.name" in browser.value("document.getElementById('differences').textContent")
    last = "[...grid.children].filter(one => one.offsetWidth).at(-1)"
    edges = f"(grid => [grid, {last}].map(one => one.getBoundingClientRect().right))(document.querySelector('.grid'))"
    for _ in range(3):  # of an odd and of an even number of charts every row is full
        grid, chart = browser.value(edges)
        assert chart == pytest.approx(grid, abs=1)
        browser.value("document.querySelector('.grid').append(document.createElement('figure'))")
    browser.value("document.querySelectorAll('.grid > figure:empty').forEach(one => one.remove())")
    browser.value("document.querySelector('#chips button').click()")
    browser.wait(f"({LEGEND}).length === 2")
    browser.value(
        "(over => (over.value = 'bytes', over.dispatchEvent(new Event('change'))))(document.getElementById('over'))"
    )
    browser.wait("page.charts.get('accuracy')?.plot.data[0].at(0) === 40")


def open_report(browser: Browser, root: Path, out: Path) -> None:
    """Open a report of three folders from its file, on a narrow screen: it shows the same, and asks for nothing."""
    assert main(["report", *(str(root / name) for name in ("first", "second", "broken")), "--out", str(out)]) == 0
    runs = load_all([root / "first", root / "second"])
    browser.open((out / "index.html").as_uri())
    browser.wait(f"location.protocol === 'file:' && document.readyState === 'complete' && ({LEGEND}).length === 3")
    assert sorted(browser.value(NAMES)) == sorted(["broken", *(run.name for run in runs)])
    accuracy = "[...table.rows.values()].filter(row => row.state !== 'broken').map(row => [row.name, row.accuracy])"
    assert browser.value(accuracy) == [[run.name, run.final_accuracy] for run in runs]
    cells = "[...document.querySelectorAll('#runs tbody tr:not(.space)')].map(tr => tr.textContent).join()"
    assert all(f"{100 * (run.final_accuracy or 0):.1f}" in browser.value(cells) for run in runs)
    assert "line 1 is not the record of round 1" in browser.value("document.getElementById('broken').textContent")
    browser.wait("page.turns.cells.length === 3 * 4 * 3 && document.getElementById('turns').height > 100")
    browser.value("(page.zoom = [2, 3, 1, 2], refresh())")  # rounds 2 and 3 of clients 1 and 2
    browser.wait("page.turns.width === 2")
    assert browser.value("[...page.turns.cells]") == [255, 255] + [0] * 10
    press = "key => document.getElementById('turns').dispatchEvent(new KeyboardEvent('keydown', {key}))"
    for key, window in (
        ("ArrowLeft", [1, 2, 1, 2]),
        ("ArrowDown", [1, 2, 2, 3]),
        ("+", [1, 1, 2, 2]),
        ("-", [1, 2, 1, 2]),
    ):
        browser.value(f"({press})('{key}')")
        browser.wait(f"page.turns.window.join() === '{','.join(map(str, window))}'")
    unnamed = "[...document.querySelectorAll('canvas')].filter(one => one.role !== 'img' || one.ariaLabel.length < 20)"
    assert browser.value(f"{unnamed}.length") == 0
    assert browser.value("page.charts.get('shares').plot.scales.x.min") == 0
    browser.value("showShares({ x: [50, 50], y: [0, 100], note: 'One never did.' })")  # as a run goes on
    assert "One never did." in browser.value("page.charts.get('shares').plot.root.querySelector('canvas').ariaLabel")
    browser.value("choose([...table.rows.values()].find(row => row.name === 'first').id)")
    browser.wait(f"({LEGEND}).length === 2")
    assert browser.value("performance.getEntriesByType('resource').filter(one => !one.name.startsWith('data:'))") == []
    assert browser.value("document.documentElement.scrollWidth <= 400")
    browser.value("(table.rows.clear(), table.arrange())")
    assert browser.value("document.getElementById('count').textContent").startswith("No runs yet")


def train_beside(browser: Browser, root: Path) -> None:
    """See a run train: its row and its curve grow before it ends."""
    row = "[...table.rows.values()].find(row => row.name.startsWith('live/'))"
    training = Thread(target=lambda: askew.run("fedavg", clients=4, rounds=400, out=root / "live"))
    training.start()
    first = browser.wait(f"({row})?.state === 'running' && ({row}).round")
    browser.value(f"page.chosen.has(({row}).id) || choose(({row}).id)")
    browser.wait(f"({row}).state === 'running' && ({row}).round > {first}")
    curve = "page.charts.get('accuracy')?.plot.data[0].length ?? 0"
    points = browser.wait(curve)
    browser.wait(f"({curve}) > {points}")
    training.join()
    browser.wait(f"({row}).state === 'finished' && ({row}).round === 400")


# values of a curve, and the marks beside it
AXES: tuple[tuple[list[float], list[str]], ...] = (
    ([2.4, 1.1, 0.6], ["0.5", "1", "1.5", "2", "2.5"]),
    ([4e4, 2e4, 9e4], ["2e4", "4e4", "6e4", "8e4"]),
    ([4e-5, 2e-5, 9e-5], ["2e-5", "4e-5", "6e-5", "8e-5"]),
    ([0.0, 3e33, 1e33], ["0", "1e33", "2e33", "3e33"]),
    ([1234.5, 1234.6, 1234.9], ["1234.5", "1234.6", "1234.7", "1234.8", "1234.9"]),
    ([2.3, 4e9, 8e33], ["1e5", "1e10", "1e15", "1e20", "1e25", "1e30"]),
)
# has an axis room for its marks, beside its ticks and a gap?
FITS = (
    "axis => (pen => (pen.font = FONT, axis._values.every(text => pen.measureText(text).width <= axis._size - 15)))"
    "(document.createElement('canvas').getContext('2d'))"
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed")
def test_axes_can_be_read_whatever_their_values_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "draw_pictures", lambda groups: [])
    browser = Browser(tmp_path / "profile")
    try:
        for number, (losses, marks) in enumerate(AXES):
            make_run(tmp_path / str(number), [record(n, loss=loss) for n, loss in enumerate(losses, 1)])
            browser.see(1280, 900)
            browser.open(page.write_report(load_all([tmp_path / str(number)]), tmp_path / f"page {number}").as_uri())
            plot = "page.charts.get('loss')?.plot"
            browser.wait(f"location.href.includes('page%20{number}') && document.readyState === 'complete'")
            browser.wait(f"({plot})?.axes[1]._values")
            assert browser.value(f"({plot}).axes[1]._values.filter(Boolean)") == marks
            assert browser.value(f"({plot}).axes[0]._values.filter(Boolean)") == ["1", "2", "3"]  # rounds are whole
            assert browser.value(f"({FITS})(({plot}).axes[1])")
        texts = browser.value("[0, 2.25, 4096, 6.5e32, 0.00025].map(numberText)")
        assert texts == ["0.00", "2.25", "4096", "6.5e32", "2.5e-4"]
        assert browser.value("[0.02, 7, 300].map(duration)") == ["20 ms", "7.0 s", "5 min"]
        assert browser.errors == []
    finally:
        browser.close()
