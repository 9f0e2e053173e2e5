"""How fluid the page of `askew watch` and `askew report` is: 2,000 runs, and 1,000 clients by 10,000 rounds.

    python benchmarks/page.py [--report]

Run folders are written to a temporary folder. Printed are the times until the first row and the first curves are seen,
of a sort and of a filter until the next frame, and the times between frames while the page or the table is scrolled.
It needs chromium, and is meant for a machine that does nothing else: the load is printed too.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from threading import Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from askew.experiment import toml
from askew.experiment.store import load_all, write_json, write_lines
from askew.report import page as report_module
from askew.watch.server import WatchServer
from browser import Browser

TABLES: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "alpha": 0.2},
    "participation": {"name": "uniform", "fraction": 0.1},
    "model": {"name": "mlp"},
    "local": {"lr": 0.1},
}
FRAMES = """new Promise(done => {
  const target = %s, gaps = [];
  let last = performance.now(), step = 0;
  const move = now => {
    gaps.push(now - last);
    last = now;
    target.scrollTop += %d;
    if (++step < 120) requestAnimationFrame(move); else done(gaps.slice(2).sort((a, b) => a - b));
  };
  requestAnimationFrame(move);
})"""
UNTIL_FRAME = """new Promise(done => {
  const start = performance.now();
  (() => { %s })();
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
})"""
FIRST_SEEN = """new Promise(done => {
  const look = () => (%s) ? requestAnimationFrame(() => done(performance.now())) : setTimeout(look, 5);
  look();
})"""


def write_run(folder: Path, number: int, clients: int, rounds: int, cohort: int) -> None:
    """A run folder with invented numbers."""
    rng = random.Random(number)
    folder.mkdir(parents=True)
    config = {"seed": number, "rounds": rounds, "algorithm": {"name": rng.choice(["fedavg", "scaffold", "feddyn"])}}
    tables = TABLES | {"partition": TABLES["partition"] | {"clients": clients}}
    (folder / "run.toml").write_text(toml.seal(toml.to_toml(config | tables)))
    write_json(folder / "run.json", {"state": "finished", "engine": "sequential"})
    labels = [[rng.randrange(9) for _ in range(10)] for _ in range(clients)]
    write_json(
        folder / "federation.json", {"clients": clients, "sizes": [sum(row) for row in labels], "labels": labels}
    )
    sent = {"bytes_up": 1000, "bytes_down": 1000, "dropped": 0, "seconds": 0.01}
    records = [
        {
            "round": t,
            "participants": sorted(rng.sample(range(clients), cohort)),
            "train_loss": 2 / t + rng.random() / 9,
            "accuracy": 1 - 1 / (1 + t / rounds) + rng.random() / 9,
            "loss": 2 / t + rng.random() / 9,
            **sent,
        }
        for t in range(1, rounds + 1)
    ]
    write_lines(folder / "rounds.jsonl", records)


def measure(browser: Browser, url: str) -> None:
    """Print the times of one page."""
    browser.see(1280, 900)
    browser.open("about:blank")
    browser.open(url)
    row = browser.value(FIRST_SEEN % "document.querySelector('#runs tbody tr:not(.space)')")
    paint = browser.value("performance.getEntriesByType('paint').map(one => one.startTime)")
    heat = browser.value(
        FIRST_SEEN % "page.charts.get('accuracy')?.plot && document.getElementById('turns').height > 100"
    )
    browser.wait("![...table.rows.values()].some(row => row.state === 'being read')", 300)
    sort = browser.value(UNTIL_FRAME % "document.querySelector('th[data-key=accuracy] button').click()")
    typed = "const f = document.getElementById('filter'); f.value = '%s'; f.dispatchEvent(new Event('input'))"
    filtered = browser.value(UNTIL_FRAME % (typed % "scaffold seed1"))
    browser.value(UNTIL_FRAME % (typed % ""))
    print(f"  first paint {min(paint):.0f} ms, first row {row:.0f} ms, curves and heat map {heat:.0f} ms;", end=" ")
    print(f"sort {sort:.0f} ms, filter {filtered:.0f} ms")
    for name, target, pixels in (
        ("page", "document.scrollingElement", 40),
        ("table", "document.getElementById('scroll')", 90),
    ):
        browser.value("scrollTo(0, 0)")
        gaps = browser.value(FRAMES % (target, pixels))
        middle, high, longest = gaps[len(gaps) // 2], gaps[int(0.95 * len(gaps))], gaps[-1]
        print(f"  frames, {name} scrolled: median {middle:.0f} ms, 95% below {high:.0f} ms, longest {longest:.0f} ms")


def main() -> None:
    report_module.draw_pictures = lambda groups: []  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        root = Path(place)
        browser = Browser(root / "profile")
        try:
            for name, count, clients, rounds, cohort in (("many", 2000, 30, 40, 6), ("long", 1, 1000, 10_000, 100)):
                for number in range(count):
                    write_run(root / name / f"run-seed{number}", number, clients, rounds, cohort)
                print(
                    f"{count} runs of {clients} clients and {rounds} rounds; load {os.getloadavg()[0]:.1f}", flush=True
                )
                if "--report" in sys.argv:
                    path = report_module.write_report(load_all([root / name]), root / f"{name}-report")
                    print(f"  report: {path.stat().st_size / 1e6:.1f} MB")
                    measure(browser, path.as_uri())
                else:
                    with WatchServer(root / name) as server:
                        Thread(target=server.serve_forever, daemon=True).start()
                        measure(browser, server.url)
                        server.shutdown()
        finally:
            browser.close()


if __name__ == "__main__":
    main()
