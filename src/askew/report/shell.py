"""The page that `askew watch` serves and `askew report` writes: its files, and how one file is made of them."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

STATIC = Path(__file__).parent / "static"
STYLES = ("uplot.min.css", "style.css", "text.css")
SCRIPTS = ("uplot.min.js", "heat.js", "axes.js", "table.js", "source.js", "page.js")
LICENCE = "uplot-LICENSE.txt"  # of the library that draws curves
HEADING = "<h1>askew <span>watch</span></h1>"


def read_static(name: str) -> str:
    """The content of one of the page's files."""
    return (STATIC / name).read_text(encoding="utf-8")


def single_page(title: str, top: str, end: str, data: str) -> str:
    """The page as one file: its scripts and styles are in it, and the data (JSON) that it shows. It loads nothing.

    `title`, `top` and `end` are HTML: the heading, what comes before the table of runs, and what comes last. The page's
    policy names its scripts and styles by their hashes, so that nothing else can run.
    """
    scripts = [read_static(name).strip() for name in SCRIPTS]
    scripts[0] = f"/*! uPlot\n{read_static(LICENCE)}\n*/\n" + scripts[0].partition("\n")[2]  # without its address
    styles = [read_static(name).strip() for name in STYLES]
    icon = b64encode((STATIC / "icon.svg").read_bytes()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src {hashes(styles)}; script-src {hashes(scripts)}; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    harmless = data.replace("<", r"\u003c")  # no text in it can end the element
    held = f'<script type="application/json" id="data">{harmless}</script>'
    swaps = {
        '<meta charset="utf-8">': meta,
        'href="icon.svg"': f'href="data:image/svg+xml;base64,{icon}"',
        "<title>askew watch</title>": f"<title>{title}</title>",
        HEADING: f'<h1 class="title">{title}</h1>',
        "<!-- top -->": top,
        "<!-- end -->": end,
        "</body>": "\n".join([held, *(f"<script>{script}</script>" for script in scripts), "</body>"]),
    }
    swaps |= {f'<link rel="stylesheet" href="{n}">': f"<style>{s}</style>" for n, s in zip(STYLES, styles, strict=True)}
    swaps |= {f'<script src="{name}" defer></script>\n': "" for name in SCRIPTS}
    shell = read_static("index.html")
    assert all(shell.count(old) == 1 for old in swaps)
    return re.sub("|".join(map(re.escape, swaps)), lambda found: swaps[found[0]], shell)


def hashes(texts: list[str]) -> str:
    """What names these scripts or styles in a policy."""
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)
