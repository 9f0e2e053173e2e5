"""The server of `askew watch`: this machine alone, a token in the address, and nothing but reading.

No text of a request is ever part of a path: files are chosen from a fixed list, runs by their number.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..errors import ConfigError
from ..experiment.store import to_json
from ..report import views
from ..report.shell import SCRIPTS, STATIC, STYLES
from .folders import RunFolders, WatchedRun

ADDRESS = "127.0.0.1"
FILES = {  # what the browser requests: the file, and its type
    "": ("index.html", "text/html; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
    **{name: (name, "text/css; charset=utf-8") for name in STYLES},
    **{name: (name, "text/javascript; charset=utf-8") for name in SCRIPTS},
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_PAGES = 24  # that may wait for changes at once
HEARTBEAT = 10.0  # seconds after which a page that waits is sent a line, which fails if it is no longer there
REST = 0.25  # seconds between two messages to a page


class WatchServer(ThreadingHTTPServer):
    """Serves the page of one folder."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, root: Path, port: int = 0) -> None:
        self.folders = RunFolders(root)
        self.token = secrets.token_urlsafe(24)
        self.pages = BoundedSemaphore(MOST_PAGES)
        try:
            super().__init__((ADDRESS, port), WatchHandler)
        except OSError as e:
            raise ConfigError(
                f"watch: cannot listen on port {port} ({e.strerror}); choose another --port, or leave it out."
            ) from None
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        self.folders.start()

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def server_close(self) -> None:
        """Listen and read no longer."""
        self.folders.stop()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away."""


class WatchHandler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds for a request to come

    def version_string(self) -> str:
        """What is said of this server: no versions."""
        return "askew"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: requests hold the token."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request in one sentence."""
        self.close_connection = True
        self.reply((message or HTTPStatus(code).phrase).encode() + b"\n", "text/plain; charset=utf-8", code)

    def do_GET(self) -> None:
        """Answer a request for the page, one of its files, or what it shows."""
        if self.headers.get("Host") not in self.server.hosts:
            self.send_error(403, "Use the address that askew watch printed: this Host is another one.")
            return
        url = urlsplit(self.path)
        token, _, name = url.path.removeprefix("/").partition("/")
        if not compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            self.send_error(403, "Use the address that askew watch printed: this token is wrong or missing.")
        elif name in FILES:
            file, kind = FILES[name]
            self.reply((STATIC / file).read_bytes(), kind)
        elif name == "events":
            self.send_events(parse_qs(url.query))
        elif name in ANSWERS:
            self.answer(ANSWERS[name], parse_qs(url.query))
        else:
            self.send_error(404, "There is no such page.")

    def answer(self, view: Callable[[RunFolders, Query], Any], query: Query) -> None:
        """Send what a view says, as JSON."""
        try:
            body = to_json(view(self.server.folders, query)).encode()
        except (ValueError, IndexError):
            self.send_error(400, "This request names no run or is not of the form that the page sends.")
            return
        except Exception as e:  # a file from somebody else: the page shows this in the panel, and goes on
            self.send_error(500, f"This cannot be shown ({type(e).__name__}).")
            return
        self.reply(body, "application/json")

    def reply(self, body: bytes, kind: str, code: int = 200) -> None:
        """Send an answer with the headers that all have."""
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_events(self, query: Query) -> None:
        """Send the rows of runs that change, as server-sent events, until the page is closed."""
        try:
            since = number(query, "since")
        except ValueError:
            self.send_error(400, "since is no number.")
            return
        if not self.server.pages.acquire(blocking=False):
            self.send_error(503, "Too many pages wait for changes; close some.")
            return
        try:
            self.close_connection = True
            self.send_response(200)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.follow(since)
        except OSError:
            pass  # the page was closed
        finally:
            self.server.pages.release()

    def follow(self, since: int) -> None:
        """Write an event for each batch of changes after this version."""
        folders = self.server.folders
        while not folders.stopped.is_set():
            since, changed = folders.changes(since, HEARTBEAT)
            text = to_json({"version": since, "rows": [views.row(run) for run in changed]}) if changed else ""
            self.wfile.write(f"id: {since}\ndata: {text}\n\n".encode() if changed else b": still here\n\n")
            self.wfile.flush()
            folders.stopped.wait(REST)


# what the page requests ---------------------------------------------------------------------------------------------

Query = dict[str, list[str]]


def number(query: Query, name: str) -> int:
    """A whole number of a request; 0 where it is left out."""
    text = query.get(name, ["0"])[0]
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise ValueError(name)
    return int(text)


def chosen(folders: RunFolders, query: Query) -> list[WatchedRun]:
    """The runs whose numbers a request names."""
    texts = query.get("ids", [""])[0].split(",")[: views.MOST_CHOSEN]
    return [folders.runs[number({"id": [text]}, "id")] for text in texts if text]


def one(folders: RunFolders, query: Query) -> WatchedRun:
    """The run whose number a request names."""
    return folders.runs[number(query, "id")]


def table(folders: RunFolders, query: Query) -> dict[str, Any]:
    """All rows, and the version that they have."""
    version = folders.version  # before the rows: what changes meanwhile is sent again
    return {"version": version, "folder": str(folders.root), **views.table(list(folders.runs))}


def window(query: Query) -> list[int]:
    """The part of a heat map that a request names: rounds and clients, from and to."""
    return [number(query, name) for name in ("first", "last", "low", "high")]


ANSWERS: dict[str, Callable[[RunFolders, Query], Any]] = {
    "runs": table,
    "curves": lambda folders, query: [views.curves(run) for run in chosen(folders, query)],
    "turns": lambda folders, query: views.turns(one(folders, query), window(query)),
    "clients": lambda folders, query: views.clients(one(folders, query)),
}
