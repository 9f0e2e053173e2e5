"""`askew doctor`: what is installed, what would be used, and what to do about what is missing."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..experiment.doctor import BROKEN, MISSING, MachineFinding, examine
from ..report import terminal
from .options import AsJson, Folder, Out, examples, print_json, print_rich

app = typer.Typer(add_completion=False)

STYLES = {MISSING: "yellow", BROKEN: "bold red"}


@app.command(epilog=examples("askew doctor", "askew doctor --json"))
def doctor(out: Out = Path("runs"), folder: Folder = None, as_json: AsJson = False) -> None:
    """Say what is installed, which engine would be chosen, where files are, and what to do about what is missing.

    The exit code is 1 if something is broken that every run needs.
    """
    findings = examine(out)
    broken = [finding for finding in findings if finding.state == BROKEN]
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        for topic, each in groupby(findings, key=lambda finding: finding.topic):
            print_rich(Group(Text(topic, "bold"), terminal.pairs((f.name, finding_text(f)) for f in each), Text("")))
        missing = sum(finding.state == MISSING for finding in findings)
        verdict = f"{len(broken)} broken" if broken else "all that simulations need is there"
        print_rich(Text(f"{verdict}; {missing} optional {'thing is' if missing == 1 else 'things are'} missing"))
    if broken:
        raise typer.Exit(1)


def finding_text(finding: MachineFinding) -> RenderableType:
    """A finding, and what to do below it."""
    text = Text(finding.found)
    if finding.state in STYLES:
        text = Text.assemble((f"{finding.state}: ", STYLES[finding.state]), finding.found)
    return Group(text, Text(f"→ {finding.advice}", "cyan")) if finding.advice else text
