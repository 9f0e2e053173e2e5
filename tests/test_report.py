"""The report layer: the table's numbers by hand, the pictures, and a page that stands alone."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType

import askew
from askew.cli.main import main
from askew.errors import StoreError, StoreWarning
from askew.experiment.folder_lock import lock_folder
from askew.experiment.store import DIVERGED, REACHED, Run, find_run_folders, load, load_all
from askew.experiment.toml import to_toml
from askew.report import figures, labels, page, page_comparison, table, terminal, views, write_figures, write_report
from askew.report.figures import draw_pictures, use_log_axis
from askew.report.page import headline
from askew.report.picture import WIDTH, canvas, drawn_for, style
from askew.report.significance import compare_methods
from askew.report.tables import RunGroup, best_groups, group_runs, participation_name, partition_name
from askew.report.verdicts import verdict_remarks

Make = Callable[..., Run]
VOID = {"meta", "img", "br", "hr", "link", "input"}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write a run folder as plain text and load it."""

    def make_run(
        algorithm: str = "fedavg",
        accuracy: Sequence[float | None] = (0.2, 0.5, 0.4),
        seed: int = 1,
        settings: dict[str, Any] | None = None,
        partition: dict[str, Any] | None = None,
        federation: dict[str, Any] | None = None,
        local: dict[str, Any] | None = None,
        rounds: int | None = None,
        data: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
    ) -> Run:
        folder = tmp_path / "runs" / str(len(list(tmp_path.glob("runs/*"))))
        folder.mkdir(parents=True)
        config = {
            "seed": seed,
            "rounds": len(accuracy) if rounds is None else rounds,
            "data": data or {"name": "digits"},
            "partition": {"name": "dirichlet", "clients": 4, "alpha": 0.2} | (partition or {}),
            "participation": {"name": "uniform", "fraction": 0.5},
            "model": model or {"name": "mlp"},
            "algorithm": {"name": algorithm} | (settings or {}),
            "local": {"epochs": 1, "lr": 0.1} | (local or {}),
        }
        records = [
            {
                "round": t,
                "participants": [t % 4, (t + 1) % 4],
                "train_loss": 2.0 / t,
                "accuracy": value,
                "loss": None if value is None else 1 - value,
                "bytes_up": 1_000_000,
                "bytes_down": 2_000_000,
                "seconds": 9.0 if t == 1 else 0.25,
                "dropped": int(t == 2),
            }
            for t, value in enumerate(accuracy, 1)
        ]
        (folder / "run.toml").write_text(to_toml(config), encoding="utf-8")
        (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        state = "finished" if len(records) == config["rounds"] else "interrupted"
        facts = {"state": state, "engine": "sequential", "version": "0.1.0"}
        (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
        known = {
            "clients": 4,
            "classes": 3,
            "sizes": [3, 5, 2, 9],
            "labels": [[3, 0, 0], [1, 4, 0], [0, 0, 2], [3, 3, 3]],
        }
        (folder / "federation.json").write_text(
            json.dumps(known if federation is None else federation), encoding="utf-8"
        )
        return load(folder)

    return make_run


class Reader(HTMLParser):
    """Collects tags and text, and refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, dict[str, str | None], str]] = []  # scripts and styles
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["style"], ["script"]):
            self.blocks.append((*self.tags[-1], data))
        else:
            self.text += data


def report(
    runs: Sequence[Run], folder: Path, title: str | None = None, broken: dict[Path, str] | None = None
) -> tuple[str, Reader]:
    """The page and what a parser finds in it: nothing from elsewhere, and no script or style but its own."""
    text = write_report(runs, folder, title, broken).read_text(encoding="utf-8")
    assert "http://" not in text and "https://" not in text
    read = Reader(text)
    for tag, attributes in read.tags:
        assert not {"style", "srcset", "ping", "action", "formaction"} & attributes.keys() and tag not in LOADING
        assert not any(key.startswith("on") for key in attributes)
        for value in (attributes.get(key) for key in ("src", "href")):
            assert value is None or value.startswith("data:") or (tag == "a" and value.startswith("#"))
        assert attributes.get("alt") if tag == "img" else True
    assert_policy(read)
    return text, read


LOADING = {"iframe", "object", "embed", "base", "form", "video", "audio", "source"}  # tags that load or send something


def assert_policy(read: Reader) -> None:
    """The page's policy forbids all but its scripts and styles, which it names by their hashes."""
    policies = [a["content"] or "" for _, a in read.tags if a.get("http-equiv") == "Content-Security-Policy"]
    parts = dict(part.split(" ", 1) for part in policies[0].split("; "))
    assert len(policies) == 1 and parts["default-src"] == "'none'" and parts["img-src"] == "data:"
    assert parts.keys() == {"default-src", "img-src", "style-src", "script-src", "base-uri", "form-action"}
    for tag in ("style", "script"):
        texts = [text for at, attributes, text in read.blocks if at == tag and "type" not in attributes]
        hashed = [b64encode(sha256(text.encode()).digest()).decode() for text in texts]
        assert parts[f"{tag}-src"] == " ".join(f"'sha256-{each}'" for each in hashed)
        assert not any(re.search(r"url\(|@import|import\(|importScripts", text) for text in texts)
    assert [a for tag, a in read.tags if tag == "script" and a] == [{"type": "application/json", "id": "data"}]


def held_data(read: Reader) -> dict[str, Any]:
    """What the page holds for its script, with the runs unpacked."""
    (text,) = [text for tag, attributes, text in read.blocks if attributes.get("id") == "data"]
    data: dict[str, Any] = json.loads(text)
    return data | {"runs": [json.loads(zlib.decompress(b64decode(each))) for each in data["runs"]]}


def test_one_run_by_hand(make: Make) -> None:
    (row,) = table([make(accuracy=(0.2, 0.5, 0.4))])
    assert row["label"] == row["algorithm"] == "fedavg"
    assert (row["seeds"], row["best_accuracy"], row["best_accuracy_std"], row["best_round"]) == (1, 0.5, None, 2)
    assert (row["final_accuracy"], row["train_loss"], row["test_loss"], row["rounds"]) == (
        0.4,
        pytest.approx(2 / 3),
        0.6,
        3,
    )
    assert (row["seconds_per_round"], row["bytes_up"], row["bytes_down"], row["dropped"]) == (
        0.25,
        3_000_000,
        6_000_000,
        1,
    )
    assert (row["target"], row["rounds_to_target"], row["speedup"]) == (0.5, 2, 1.0)


def test_who_takes_part_in_words() -> None:
    some = {"participation": {"name": "uniform", "cohort": 10}}
    assert participation_name(some) == "10 take part each round"
    buffered = {"wait": "buffer", "buffer": 3, "at_work": 0}
    assert participation_name(some | {"time": buffered}) == "10 are at work, 3 make a step"
    assert participation_name(some | {"time": buffered | {"at_work": 6}}) == "6 are at work, 3 make a step"


def test_a_partition_in_words_without_what_every_partition_has_by_default() -> None:
    own = {"name": "one_class", "clients": 40, "noise": 0.0, "rotation": 0.0, "depth": 2}
    assert partition_name({"partition": own}) == "One class depth = 2"
    assert partition_name({"partition": own | {"noise": 0.1}}) == "One class noise = 0.1, depth = 2"


def test_seeds_become_one_row(make: Make) -> None:
    runs = [make(accuracy=(0.2, 0.5, 0.4), seed=1), make(accuracy=(0.1, 0.3, 0.7), seed=2)]
    (row,) = table(runs)
    assert row["seeds"] == 2
    assert row["best_accuracy"] == pytest.approx(0.6)
    assert row["best_accuracy_std"] == pytest.approx(stdev([0.5, 0.7]))
    assert row["best_round"] == 2.5
    assert row["final_accuracy"] == pytest.approx(0.55)
    assert row["target"] == pytest.approx(0.55)  # the mean curve is 0.15, 0.4, 0.55
    assert row["rounds_to_target"] == 3


def test_the_same_run_twice_counts_once_and_the_longer_one_wins(make: Make) -> None:
    runs = [make(accuracy=(0.2,), rounds=3), make(accuracy=(0.2, 0.5, 0.4)), make(accuracy=(0.2, 0.5), rounds=3)]
    (row,) = table(runs)
    assert (row["seeds"], row["rounds"], row["best_accuracy"], row["finished"]) == (1, 3, 0.5, True)
    assert row["repeated"] == 2 and "2 runs are not counted: there are others" in repr(askew.compare(runs))
    assert "1 run is not counted: there is another one" in repr(askew.compare(runs[1:]))


def test_rounds_to_target_and_speedup(make: Make) -> None:
    runs = [
        make("feddyn", (0.3, 0.6, 0.7, 0.7)),
        make("fedavg", (0.2, 0.3, 0.4, 0.6)),
        make("fedcm", (0.1, 0.1, 0.2, 0.59)),
    ]
    feddyn, fedavg, fedcm = table(runs)
    assert {row["target"] for row in table(runs)} == {0.6}
    assert (feddyn["rounds_to_target"], feddyn["speedup"]) == (2, 2.0)
    assert (fedavg["rounds_to_target"], fedavg["speedup"]) == (4, 1.0)
    assert (fedcm["rounds_to_target"], fedcm["speedup"]) == (None, None)


def test_a_seed_that_was_stopped_counts_in_later_rounds_too(make: Make) -> None:
    def stopped(state: str, *accuracy: float) -> Run:
        run = make(accuracy=accuracy, rounds=4, seed=1)
        return replace(run, facts=run.facts | {"state": state})

    whole = make(accuracy=(0.3, 0.4, 0.5, 0.8))
    reached, diverged = (RunGroup("fedavg", (whole, stopped(state, 0.4, 0.6))) for state in (REACHED, DIVERGED))
    assert reached.curve("accuracy").mean == pytest.approx([0.35, 0.5, 0.55, 0.7])
    assert reached.rounds_to(0.55) == 3 and reached.rounds_to(0.75) is None
    assert diverged.rounds_to(0.8) is None


@pytest.mark.parametrize(
    ("alone", "sentence"),
    [
        (1, "Means over 1 to 3 seeds, ± one standard deviation where there are several."),
        (2, "Means over 2 to 3 seeds, ± one standard deviation."),
        (3, "Means over 3 seeds, ± one standard deviation."),
    ],
)
def test_a_comparison_of_methods_with_other_numbers_of_seeds_says_so(make: Make, alone: int, sentence: str) -> None:
    runs = [make(accuracy=(0.3, 0.4 + seed / 10), seed=seed) for seed in range(3)]
    runs += [make("fedprox", (0.3, 0.7), seed=seed) for seed in range(alone)]
    assert sentence in terminal.comparison_remarks(table(runs), None)


def test_an_interrupted_seed_is_left_out_beside_one_that_ended(make: Make) -> None:
    whole, other = make(accuracy=(0.3, 0.4, 0.5, 0.8)), make("fedprox", (0.3, 0.4, 0.5, 0.7))
    begun = make(accuracy=(0.1, 0.2), rounds=4, seed=2)
    begun = replace(begun, facts=begun.facts | {"state": "interrupted"})
    alone, both = table([whole, other]), table([whole, begun, other])
    assert both == [alone[0] | {"left_out": 1}, alone[1]] and both[0]["target"] == 0.8
    assert "Left out: 1 seed that has not reached the last round." in terminal.comparison_remarks(both, None)
    (unfinished,) = table([begun])
    assert (unfinished["seeds"], unfinished["left_out"], unfinished["final_accuracy"]) == (1, 0, 0.2)


def test_the_target_is_that_of_the_same_federation(make: Make) -> None:
    runs = [
        make("fedavg", (0.5, 0.9)),
        make("fedcm", (0.5, 0.6), partition={"alpha": 1.0}),
        make("fedavg", (0.3, 0.5), partition={"alpha": 1.0}),
    ]
    easy, fedcm, hard = table(runs)
    assert (easy["target"], hard["target"], fedcm["target"]) == (0.9, 0.5, 0.5)
    assert fedcm["speedup"] == 2.0
    assert table(runs[1:2])[0]["target"] is None


def test_labels_tell_groups_apart(make: Make) -> None:
    runs = [
        make("fedavg"),
        make("fedprox", settings={"mu": 0.1}),
        make("fedprox", settings={"mu": 1.0}),
        make("feddyn", settings={"alpha": 0.1}),
    ]
    assert labels(runs) == ["fedavg", "fedprox mu=0.1", "fedprox mu=1", "feddyn"]
    rates = [make(local={"lr": 0.1}), make(local={"lr": 0.05}), make("fedcm", local={"lr": 0.01})]
    assert labels(rates) == ["fedavg local.lr=0.1", "fedavg local.lr=0.05", "fedcm"]
    worlds = [make("fedavg"), make("fedcm", partition={"alpha": 5.0})]
    assert labels(worlds) == ["fedavg partition.alpha=0.2", "fedcm partition.alpha=5"]
    near = [make("fedprox", settings={"mu": mu}) for mu in (0.1, 0.1000000001)] + [make("fedprox")]
    assert len(set(labels(near))) == 3
    simulated, deployed = make("fedavg"), make("fedavg")
    deployed.facts["engine"] = "flower"
    assert len(labels([simulated, deployed])) == 2 and "flower" in labels([simulated, deployed])[1]


@pytest.mark.slow
def test_figures_are_written(make: Make, tmp_path: Path) -> None:
    runs = [make(name, (0.1, 0.4 + 0.1 * seed, 0.5), seed=seed) for name in ("fedavg", "fedcm") for seed in (1, 2)]
    assert {path.name for path in write_figures(runs, tmp_path / "out")} == PICTURES
    assert_pictures(tmp_path / "out")
    assert write_figures([], tmp_path / "none") == []


PICTURES = {"accuracy.png", "loss.png", "partition.png", "participation.png", "bars.png"}


def assert_pictures(folder: Path) -> None:
    """A folder has all pictures of several methods."""
    contents = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert set(contents) == PICTURES
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in contents.values())


def test_the_page_holds_it_all(make: Make, tmp_path: Path) -> None:
    runs = [
        make(name, (0.1, best - 0.01 * seed, 0.4), seed=seed)
        for name, best in (("fedavg", 0.6), ("feddyn", 0.8))
        for seed in (1, 2)
    ]
    text, read = report(runs, tmp_path / "out")
    assert "4 clients, Dirichlet α = 0.2, 50% take part each round · digits · mlp · 3 rounds · 2 seeds" in read.text
    assert "feddyn reaches 78.5 ± 0.7 % test accuracy, 20.0 points above fedavg." in read.text
    assert "Rounds are counted to 58.5 %, the best of fedavg's mean curve." in read.text
    assert "<b>78.50</b>" in text and "<b>58.50</b>" not in text
    assert sum(tag == "img" for tag, _ in read.tags) == 5
    for run in runs:
        assert f"askew run {run.folder}/run.toml" in read.text
    assert read.text.count("alpha = 0.2") == 2  # the configuration of each method
    assert_pictures(tmp_path / "out")
    for picture in draw_pictures(group_runs(runs)):  # a telephone shows them whole, legends and values too
        (legend, *_), width = [*picture.figure.legends, None], picture.figure.get_figwidth()
        assert width <= 7 and (legend is None or legend._loc == 3), picture.name
    assert 'data-h="Best accuracy, %"' in text and "td::before { content: attr(data-h)" in text
    assert "min-width: 480px" not in text
    data = held_data(read)
    assert [row["accuracy"] for row in data["rows"]] == [run.final_accuracy for run in runs]
    curves, clients, turns = data["runs"][3].values()
    assert curves["round"] == [1, 2, 3] and curves["bytes"] == [3e6, 6e6, 9e6] and curves["settings"]["seed"] == "2"
    assert (curves["series"][0]["panel"], curves["series"][0]["y"]) == ("accuracy", [10, 78, 40])
    assert clients["classes"]["values"] == [3, 1, 0, 3, 0, 4, 0, 3, 0, 0, 2, 3] and turns["window"] == [1, 3, 0, 3]
    assert data["first"] == [0, 2]  # a run of each method
    for form in ("\\begin{tabular}", "| Method | Best acc", "label,federation", "--figures pdf --size column"):
        assert form in read.text
    assert "bars" not in {picture.name for picture in draw_pictures(group_runs(runs[:2]))}  # one method only


def test_everything_is_escaped(make: Make, tmp_path: Path) -> None:
    nasty = "<script>alert('&')</script>"
    text, read = report(
        [make(nasty), make("_$x$ 数", partition={"name": '"><b>'})], tmp_path / "out", title="<i>A & B</i>"
    )
    assert "<script>alert" not in text and nasty in read.text and "<i>A & B</i>" in read.text
    assert held_data(read)["rows"][0]["method"] == nasty


def test_a_lead_within_the_spread_is_called_so(make: Make) -> None:
    bests = {"fedavg": (0.5, 0.7), "fedcm": (0.52, 0.7), "feddyn": (0.5, 0.69)}
    runs = [make(name, (best,), seed=seed) for name, each in bests.items() for seed, best in enumerate(each)]
    assert headline(table(runs)).endswith("1.0 points above fedavg, a lead within the spread between seeds.")
    assert (
        headline(table([make("fedavg", (0.5,)), make("fedcm", (0.5,))]))
        == "fedavg reaches 50.0 % test accuracy, as does fedcm."
    )
    fewer = [runs[0], *runs[2:]]
    assert "11.0 points above fedavg (2 seeds against 1)" in headline(table(fewer))


def test_rounds_without_evaluation_and_regression(make: Make, tmp_path: Path) -> None:
    run = make(accuracy=(None, None, None), rounds=5)
    (row,) = table([run])
    assert (row["best_accuracy"], row["best_round"], row["target"], row["rounds_to_target"], row["finished"]) == (
        None,
        None,
        None,
        None,
        False,
    )
    text = report([run], tmp_path / "out")[1].text
    assert "No round has been evaluated yet." in text and "1 of 1 run did not reach the last round" in text
    assert not (tmp_path / "out" / "accuracy.png").exists()
    for record, loss in zip(run.rounds, (0.9, 0.5, 0.25), strict=True):
        record["loss"] = loss
    assert headline(table([run])) == "fedavg ends with a test loss of 0.25."


def plain(output: RenderableType) -> str:
    """What a terminal shows, in one line."""
    with StringIO() as file:
        Console(width=100, file=file).print(output)
        return " ".join(file.getvalue().split())


def test_a_regression_is_led_by_the_lowest_loss(make: Make) -> None:
    runs = [make("fedavg", (None,)), make("scaffold", (None,))]
    for run, loss, sent in zip(runs, (0.5, 0.25), (1_000_000, 7_000_000), strict=True):
        run.rounds[0] |= {"loss": loss, "bytes_up": sent}
    rows = table(runs)
    assert headline(rows) == "scaffold ends with a test loss of 0.25."
    tiles = Reader(page.tiles(rows)).text
    assert "0.25last test loss · scaffold" in tiles and "9 MBup and down in a run · scaffold" in tiles
    assert "fedavg" not in tiles


def test_the_target_of_several_seeds_is_called_the_best_of_their_mean_curve(make: Make) -> None:
    """Each seed has its best in another round, so that the mean of the bests is more than the best of the means."""
    curves = {"fedavg": ((0.1, 0.4, 0.2), (0.1, 0.2, 0.4)), "fedcm": ((0.5, 0.6, 0.6), (0.5, 0.6, 0.6))}
    runs = [make(name, values, seed=seed) for name, its in curves.items() for seed, values in enumerate(its)]
    remarks = plain(terminal.comparison(runs))
    assert "40.0 ± 0.0" in remarks and "Target: accuracy 30.0%, the best of fedavg's mean curve." in remarks
    assert headline(table(runs)).endswith(
        "It needs 1 round to reach the best of fedavg's mean curve, which itself takes 2."
    )
    assert "fewer rounds to the best of fedavg&#x27;s mean curve · fedcm" in page.tiles(table(runs))
    assert "Target: accuracy 40.0%, the best of fedavg." in plain(terminal.comparison(runs[::2]))
    assert headline(table(runs[::2])).endswith("It needs 1 round to reach the best of fedavg, which itself takes 2.")
    other = make("fedavg", (0.3, 0.5), seed=1, model={"name": "linear"})
    assert "Target: the best of fedavg's mean curve on the same task." in plain(terminal.comparison([*runs, other]))


DIVERGED_SENTENCE = "diverged: in rounds 1 to 3 the training loss reached 9e+32; try a lower local.lr"


def test_runs_that_diverged_are_not_shown_as_results(make: Make, tmp_path: Path) -> None:
    runs = [make(name, seed=seed) for name in ("fedavg", "scaffold", "feddyn") for seed in (1, 2)]
    for run in (runs[0], runs[1], runs[2]):
        run.facts["diverged"] = DIVERGED_SENTENCE
    remark = "3 of 6 runs diverged: fedavg (2 of 2), scaffold (1 of 2); their numbers are those before or after it."
    assert remark in plain(terminal.comparison(runs))
    assert [row["diverged"] for row in table(runs)] == [2, 1, 0]
    assert headline(table(runs[:4])) == (
        "fedavg (diverged) reaches 50.0 ± 0.0 % test accuracy, as does scaffold (1 of 2 runs diverged)."
    )
    read = report(runs, tmp_path / "out")[1]
    assert remark in read.text and "fedavg diverged" in read.text and "scaffold 1 diverged" in read.text
    states = [row["state"] for row in held_data(read)["rows"]]
    assert states == [DIVERGED, DIVERGED, DIVERGED, "finished", "finished", "finished"]
    assert read.text.count(DIVERGED_SENTENCE) == 3  # among the configurations
    assert "diverged, 3 rounds" in plain(terminal.run_details(runs[0]))
    alone = "1 of 1 run diverged: fedavg (1 of 1); its numbers are those before or after it."
    assert alone in plain(terminal.comparison(runs[:1]))
    many = [make("fedprox", settings={"mu": n}) for n in range(1, 9)]
    for run in many:
        run.facts["diverged"] = DIVERGED_SENTENCE
    assert "fedprox mu=6 (1 of 1) and 2 more; their numbers" in plain(terminal.comparison(many))


def test_a_run_that_is_being_trained_is_said_to_be_running(make: Make, tmp_path: Path) -> None:
    """It would be refused to go on with it, and it may yet reach its last round."""
    run, other = make(rounds=9), make("fedcm")
    assert run.folder is not None
    with lock_folder(run.folder):
        shown, compared = plain(terminal.run_details(run)), plain(terminal.comparison([run, other]))
        text = report([run, other], tmp_path / "out")[1].text
    assert "running, 3 of 9 rounds" in shown and f"watch it askew watch {run.folder.parent}" in shown
    assert "askew run" not in shown
    assert "1 of 2 is still being trained; the figures are those so far." in compared
    assert "1 of 2 runs was still being trained; the figures count the rounds so far." in text
    assert "did not reach" not in compared + text
    shown, compared = plain(terminal.run_details(run)), plain(terminal.comparison([run, other]))
    assert "go on askew run" in shown and "1 of 2 rows did not reach the last round." in compared


@pytest.mark.parametrize("size", [None, "column", "page"])
@pytest.mark.parametrize("span", [31, 9e3, 2e4, 1e9, 1e40])
def test_a_logarithmic_axis_has_marks_however_long_it_is(span: float, size: str | None) -> None:
    with drawn_for(size) if size else nullcontext(), style():
        axes = canvas(WIDTH, 3.5).add_subplot()
        axes.plot([1, 2], [0.3, 0.3 * span])
        use_log_axis(axes, [0.3, 0.3 * span])
        low, high = axes.get_ylim()
        marks = [mark for mark in axes.get_yticks() if low <= mark <= high]
    assert 3 <= len(marks) <= 14


def test_one_round_is_one_round_in_words_and_on_the_axis(make: Make) -> None:
    run = make(accuracy=(0.2,))
    assert terminal.state(run) == "finished, 1 round"
    with style():
        pictures = {each.name: each for each in draw_pictures(group_runs([run]))}
        axis = pictures["accuracy"].figure.axes[0]
        low, high = axis.get_xlim()
        marks = [float(mark) for mark in axis.get_xticks() if low <= mark <= high]
    assert marks and all(mark == round(mark) for mark in marks)
    assert " of 1 round;" in pictures["participation"].note


@pytest.mark.parametrize(
    ("sizes", "engine", "note"),
    [
        ([3, 1], "slots", "1 of 2 clients took no turn so far; it holds 25% of the data."),
        ([3, 0], "slots", "1 of 2 clients took no turn so far; it holds 0% of the data."),
        ([3, 0], "flower", "1 of 2 clients took no turn so far; what it holds is not known."),
        ([3, 0, 0], "flower", "2 of 3 clients took no turn so far; what they hold is not known."),
        (
            [3, 1, 0],
            "flower",
            "2 of 3 clients took no turn so far; they hold 25% of the data, and of 1 client that is not known.",
        ),
    ],
)
def test_clients_without_a_turn_hold_their_data(sizes: list[int], engine: str, note: str) -> None:
    """Of a client that never came to a deployment nobody knows what it holds; its size is stored as 0."""
    asked = np.zeros(3, np.uint32).tobytes(), np.full(3, views.USED, np.uint8).tobytes(), None
    columns = SimpleNamespace(count=3, asked=lambda first, last: asked)
    run: Any = SimpleNamespace(federation={"sizes": sizes}, columns=columns, facts={"engine": engine})
    assert views.shares(run)["note"] == note


def test_who_took_part_and_what_they_hold_in_words(make: Make) -> None:
    """A span of one number is that number, and clients that never came to a deployment hold what nobody knows."""
    federation = {"clients": 4, "classes": 0, "sizes": [1, 1, 1, 0]}
    note = lambda run, name: next(p.note for p in draw_pictures(group_runs([run])) if p.name == name)
    run = make(federation=federation)
    assert note(run, "partition") == "A client holds 0 to 1 sample."
    run.facts["engine"] = "flower"
    assert note(run, "partition") == "A client holds 1 sample; of 1 client that is not known."
    for record in run.rounds:
        record["participants"] = [0, 1, 2, 3]
    assert note(run, "participation") == "Clients took part in 3 of 3 rounds; nobody was left out."


def test_a_page_says_how_a_deployment_is_run_again(make: Make, tmp_path: Path) -> None:
    """Its configuration cannot be run by `askew run`: that would be a simulation, or fail for want of the data."""
    run, simulated = make(), make("fedcm")
    run.facts["engine"] = "flower"
    assert run.folder and simulated.folder
    (run.folder / "flower").mkdir()
    text = report([run, simulated], tmp_path / "out")[1].text
    assert f"askew deploy up {run.folder}/flower/app --out {run.folder.parent}" in text
    assert f"askew run {run.folder}" not in text and f"askew run {simulated.folder}" in text


def test_the_heading_says_what_is_compared(make: Make) -> None:
    """Settings of one method are no methods, and numbers of rounds share their noun."""
    changed = [make("fedcm", settings={"alpha": alpha}) for alpha in (0.1, 0.2, 0.3)]
    assert page.subject(group_runs(changed)) == "3 settings of fedcm"
    assert page.subject(group_runs([*changed, make()])) == "4 settings of 2 methods"
    assert page.subject(group_runs([changed[0], make()])) == "2 methods"
    changed[1].config["rounds"] = 8
    assert "· 3 or 8 rounds ·" in page.sentence(group_runs(changed))


def test_numbers_in_the_terminal_have_no_exponents_below_a_million(make: Make) -> None:
    assert [terminal.digits(n) for n in (0.0123456, 12.3456, 999.4, 1422, 1e6)] == [
        *("0.0123", "12.3", "999", "1,422", "1e+06"),
    ]
    run = make()
    for record in run.rounds:
        record["seconds"] = 1.5724
    assert "1,572" in plain(terminal.comparison([run]))


def test_in_a_narrow_terminal_columns_are_left_out_before_headings_are_broken(make: Make) -> None:
    runs = [make(), make("a_method_with_a_long_name_of_its_own")]
    console = Console(width=40, file=StringIO())
    console.print(terminal.comparison(runs))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "best    last\n" in shown and "acc. %  acc. %\n" in shown and "loss" not in shown


def test_huge_losses_have_exponents_in_the_table(make: Make) -> None:
    runs = [make("fedavg", (0.5,)), make("scaffold", (0.5,))]
    runs[1].rounds[0]["train_loss"] = 1.25e33
    text = page_comparison.comparison_tables([group_runs(runs)], table(runs))
    assert ">1.25e+33<" in text and "<b>2</b>" in text


def test_a_broken_folder_is_shown_as_broken(make: Make, tmp_path: Path) -> None:
    broken = make().folder
    assert broken is not None
    (broken / "rounds.jsonl").write_text("nonsense\n")
    make("fedcm", (), rounds=3, federation={})
    assert main(["report", str(broken.parent), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    rows = held_data(Reader(text))["rows"]
    assert [(row["name"], row["state"]) for row in rows] == [("1", "interrupted"), (broken.name, "broken")]
    assert "line 1 is not the record of round 1" in rows[1]["problem"]
    assert "1 run folder cannot be read: the table of runs says why." in text
    with pytest.warns(StoreWarning, match="a run is left out"):
        again = askew.report([broken.parent], out=tmp_path / "python")
    assert held_data(Reader(again.read_text(encoding="utf-8")))["rows"] == rows


def test_many_runs_are_held_in_less_detail(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves keep their peaks; the page says what it leaves out."""
    monkeypatch.setattr(page, "MANY", 0)
    monkeypatch.setattr(page, "COARSE", views.Detail(points=4, rounds=2, clients=2, classes=1))
    monkeypatch.setattr(page, "draw_pictures", lambda groups: [])
    accuracy = (0.1, 0.2, 0.9, 0.0, 0.4, 0.5, 0.3, 0.35)
    _, read = report([make(accuracy=accuracy)], tmp_path / "out")
    (run,) = held_data(read)["runs"]
    assert run["curves"]["series"][0]["y"] == [10, 90, 0, 50, 30, 35]
    assert (run["turns"]["width"], run["turns"]["height"], run["turns"]["rounds"]) == (2, 2, 8)
    assert run["clients"]["classes"]["values"] == pytest.approx([(4 + 4) / 6, (2 + 9) / 6], abs=0.01)
    assert "of each at most 4 points of a curve and 2 by 2 cells of a heat map; askew watch shows all." in read.text
    monkeypatch.setattr(page, "COARSE", views.Detail(points=8, rounds=8, clients=4, classes=3))
    assert "of each at most" not in report([make(accuracy=accuracy)], tmp_path / "out")[1].text  # nothing is left out


def test_of_very_many_methods_the_best_are_drawn(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of settings: the headline names the best fedavg, the first one being the worst."""
    for module, name, value in ((figures, "MAX_LINES", 2), (page_comparison, "MAX_LINES", 2), (figures, "MAX_BARS", 3)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(page_comparison, "LONG", 3)
    monkeypatch.setattr(views, "MOST_CHOSEN", 2)
    grid = {("fedavg", 0.1): 0.1, ("fedavg", 0.2): 0.6, ("fedcm", 0.1): 0.2, ("fedcm", 0.2): 0.7}
    runs = [make(name, (best / 2, best), local={"lr": lr}) for (name, lr), best in grid.items()]
    groups = group_runs(runs)
    assert [g.label for g in best_groups(groups, 2)] == ["fedavg local.lr=0.2", "fedcm local.lr=0.2"]
    pictures = {picture.name: picture for picture in draw_pictures(groups)}
    assert pictures["accuracy"].note == "Of 4 methods, the best 2 are drawn."
    assert pictures["bars"].note.startswith("Of 4 methods, the best 3 are drawn.")
    assert "Of 4" not in pictures["partition"].note
    assert (
        len(pictures["accuracy"].figure.axes[0].lines) == 2 and len(pictures["bars"].figure.axes[0].get_yticks()) == 3
    )
    monkeypatch.setattr(page, "draw_pictures", lambda groups: [pictures["accuracy"]])
    text, read = report(runs, tmp_path / "out")
    assert "fedcm local.lr=0.2 reaches 70.0 % test accuracy, 10.0 points above fedavg local.lr=0.2." in read.text
    assert page_comparison.colour_numbers(groups) == [None, 0, None, 1] and text.count('<i class="c1"></i>') == 2
    assert text.count('<div class="scroll long">') == 2  # the table and the configurations
    data = held_data(read)
    assert data["first"] == [1, 3]
    assert [row["label"] for row in data["rows"]] == [g.label for g in groups]
    assert data["rows"][1]["setting"].startswith("local.lr=0.2; Dirichlet")


def test_the_heading_of_a_column_names_no_long_baseline(make: Make) -> None:
    def compared(local: dict[str, Any]) -> str:
        runs = [make("fedavg", (0.2, 0.3), local=local), make("fedavg", (0.2, 0.4))]
        return Reader(page_comparison.comparison_tables([group_runs(runs)], table(runs))).text

    short, long = compared({"lr": 0.2}), compared({"lr": 0.2, "momentum": 0.9})
    assert "Rounds to fedavg local.lr=0.2's best" in short and "Rounds are counted" not in short
    assert "Rounds to target" in long
    assert "Rounds are counted to 30.0 %, the best of fedavg local.lr=0.2 local.momentum=0.9." in long


def test_a_configuration_beside_run_folders_hides_none_of_them(make: Make) -> None:
    first = make()
    make("fedprox")
    assert first.folder is not None
    runs = first.folder.parent
    (runs / "run.toml").write_text("rounds = 3\n", encoding="utf-8")
    assert [run.algorithm for run in load_all([runs])] == ["fedavg", "fedprox"]
    alone = runs.parent / "alone"
    alone.mkdir()
    shutil.copy(runs / "run.toml", alone)
    assert list(find_run_folders(alone)) == [alone]  # a run of which all else was lost


def test_runs_of_one_name_are_shown_with_their_folders(make: Make, tmp_path: Path) -> None:
    run = make()
    assert run.folder is not None
    copy = load(shutil.copytree(run.folder, tmp_path / "more" / run.name))
    assert [shown.name for shown in page.shown_runs([run, copy])] == [f"runs/{run.name}", f"more/{run.name}"]
    assert page.shown_runs([run])[0].name == run.name


def test_tests_over_seeds_are_shown_where_there_are_enough(make: Make, tmp_path: Path) -> None:
    gains = (0.10, 0.11, 0.12, 0.11)
    runs = [make("fedavg", (0.5,), seed=seed) for seed in range(4)]
    runs += [make("fedcm", (0.5 + gain,), seed=seed) for seed, gain in enumerate(gains)]
    groups = group_runs(runs)
    tests = page.seed_tests(groups)
    html = page.tests_section(tests)
    assert "Best accuracy against fedavg" in html and "+11.00" in html and "better" in html
    assert "better than fedavg: paired t-tests over seeds" in page.paper_section(runs, table(runs), tests)
    undecided = compare_methods(group_runs([*runs[:4], make("fedcm", (0.4,)), *runs[5:]]))
    assert re.search(r"if differences stay as they are\): \d+ for fedcm\.", " ".join(verdict_remarks(undecided)))
    assert page.seed_tests(group_runs([runs[0], runs[4]])) == page.seed_tests(groups[:1]) == []
    assert page.tests_section([]) == ""


def test_no_rounds_and_no_federation(make: Make, tmp_path: Path) -> None:
    text = report(
        [make(accuracy=(), rounds=3, federation={}), make("fedcm", (), rounds=3, federation={})], tmp_path / "out"
    )[1].text
    assert "No round has been evaluated yet." in text and "No run has stored who holds what" in text
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["index.html"]


def test_large_federations_say_what_is_left_out(make: Make) -> None:
    sizes = [10 + i % 7 for i in range(500)]
    federation = {
        "clients": 20_000,
        "classes": 100,
        "sizes": sizes,
        "shown": 500,
        "labels": [[n] + [0] * 99 for n in sizes],
    }
    pictures = {picture.name: picture for picture in draw_pictures(group_runs([make(federation=federation)]))}
    expected = "The first 500 of 20,000 clients are shown: each holds 1 of 100 classes and 10 to 16 samples."
    assert pictures["partition"].note == expected and expected in pictures["partition"].alt
    assert pictures["participation"].note == "Clients took part in 0 to 2 of 3 rounds; 19,996 never did."
    assert len(pictures["partition"].render("png")) > 5000 and len(pictures["participation"].render("png")) > 5000


def test_each_federation_has_its_pictures_and_table(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MAX_FEDERATIONS", 1)
    runs = [make(accuracy=(0.1, best), partition={"alpha": alpha}) for alpha, best in ((0.1, 0.3), (1.0, 0.8))]
    text, read = report(runs, tmp_path / "out")
    assert text.count('<table class="methods">') == 2 and "<b>" not in text  # nothing is best across federations
    heading = "digits, 4 clients, Dirichlet α = {}, 50% take part each round"
    assert f"Accuracy: {heading.format(0.1)}" in read.text and f"Accuracy: {heading.format(1)}" not in read.text
    assert f"{heading.format(1)}: fedavg reaches 80.0 % test accuracy, at round 2 of 2." in read.text
    assert "Of 2 federations, the pictures show the first 1." in read.text


def test_a_table_for_each_federation_and_short_labels_in_it(make: Make) -> None:
    """Data, partition and number of clients are in the heading, and no row is highlighted for more than its own."""
    elsewhere: dict[str, Any] = {"partition": {"clients": 7, "alpha": 3.0}, "data": {"name": "other", "size": 5}}
    runs = [
        make("fedavg", (0.5, 0.9)),
        make("fedcm", (0.5, 0.6), seed=2, **elsewhere),
        make("fedavg", (0.3, 0.5), seed=2, **elsewhere),
    ]
    assert [(g.label, g.federation[:6]) for g in group_runs(runs)] == [
        ("fedavg", "digits"),
        ("fedcm", "other,"),
        ("fedavg", "other,"),
    ]
    with StringIO() as file:
        Console(width=100, force_terminal=True, color_system="standard", file=file).print(terminal.comparison(runs))
        best = re.findall(r"\x1b\[1;32m\s*([\d.]+)", file.getvalue())
    assert "60.0" in best and "90.0" not in best  # the only method on its federation is not the best of anything


def test_first_weights_that_change_with_the_seed_make_one_group(make: Make) -> None:
    def own(seed: int, weights: str) -> Run:
        return make(seed=seed, model={"name": "own", "kind": "Net", "fingerprint": weights})

    (group,) = group_runs([own(0, "aa"), own(1, "bb"), own(2, "cc")])
    assert len(group.runs) == 3
    assert labels([own(0, "aa"), own(0, "bb")]) == ["fedavg (weights aa)", "fedavg (weights bb)"]


def test_what_cannot_be_written_or_shown_is_said(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write"):
        write_report([make(accuracy=(), federation={})], tmp_path / "file" / "out")
    with pytest.raises(StoreError, match="cannot write"):
        write_figures([make(accuracy=())], tmp_path / "file" / "out")
    with pytest.raises(StoreError, match="at least one run"):
        write_report([], tmp_path / "out")
