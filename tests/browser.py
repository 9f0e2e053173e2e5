"""A headless chromium, driven by its DevTools protocol over two pipes: no library is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--host-resolver-rules=MAP foreign.test 127.0.0.1"),
)


class Browser:
    """One page in a browser of its own. `errors` are what the page's scripts and its content policy complained of."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM
        (to_read, self._write), (self._read, to_write) = os.pipe(), os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 64) for end in (to_read, to_write)]
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        # chromium reads commands from 3 and writes answers to 4; high numbers, so that neither takes the other's place
        words = ["bash", "-c", f'exec 3<&{high[0]} 4>&{high[1]} "$@"', "bash", *command]
        self._process = subprocess.Popen(words, pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (*high, to_read, to_write):
            os.close(end)
        self._rest, self._number, self._session, self.errors = b"", 0, "", list[str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; errors of the page that come meanwhile are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 2**20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def see(self, width: int, height: int, scheme: str = "light") -> None:
        """Make the window so large, and light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, code: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, code: str, seconds: float = 20) -> Any:
        """Wait until an expression in the page is true; returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.value(code)):
            assert time.monotonic() < end, f"{code} is still {value!r}; {self.errors}"
            time.sleep(0.05)
        return value

    def picture(self, path: Path, whole: bool = True) -> None:
        """Store a picture of the page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
