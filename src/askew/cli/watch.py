"""`askew watch`: a web page over run folders, live while runs train, without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..watch.server import WatchServer
from .options import examples

app = typer.Typer(add_completion=False)


@app.command(epilog=examples("askew watch", "askew watch runs --port 8765"))
def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that holds run folders, or one of them.")
    ] = Path("runs"),
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port of the page; 0: one that is free.")
    ] = 0,
) -> None:
    """Show runs on a local web page, live while they train.

    Only this machine reaches the page, and only who knows its address, which holds a token. Ctrl-C ends it.
    """
    sys.setswitchinterval(0.0005)  # a page that is asked for does not wait for folders that are read
    with WatchServer(folder, port) as server:
        print(server.url, flush=True)
        server.serve_forever()
