"""A headless Chromium that tests drive over a pipe, by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which
from typing import Any, Final

from tests.patience import PATIENCE_S

CHROMIUM: Final = which("chromium")
IN, OUT = 3, 4
"""Descriptors at which Chromium reads and writes messages."""
FLAGS: Final = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


class Browser:
    """One page. ``problems`` are its console errors, exceptions and failed or foreign requests."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest, self._count, self._session = b"", 0, ""
        self.problems: list[str] = []
        self.requested: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._count:
                assert "error" not in told, (method, told)
                result: dict[str, Any] = told["result"]
                return result
            self._note(told.get("method", ""), told.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            assert part, "Chromium has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(told["args"]))

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and light or dark colours."""
        small = width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=small,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        """Open a page."""
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Return the first value of an expression that counts as true."""
        end = time.monotonic() + PATIENCE_S
        while True:
            found = self.run(script)
            if found:
                return found
            assert time.monotonic() < end, f"{script} never came true: {self.problems}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key, such as ``Tab``."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        about: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        if key == "Enter":
            about["text"] = "\r"
        self._call("Input.dispatchKeyEvent", type="keyDown", **about)
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def roles(self) -> set[tuple[str, str]]:
        """Return role and name of everything that a screen reader finds."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return {
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        }

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page."""
        told = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with its files in ``folder``, and end it."""
    assert CHROMIUM is not None, ".ci/venv installs chromium"
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # the shell moves the pipes to the numbers that Chromium expects
    moved = f'exec "$@" {IN}<&{to_read} {OUT}>&{from_write}'
    flags = (*FLAGS, f"--user-data-dir={folder}", "about:blank")
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "chromium.log").open("wb") as log:
        child = subprocess.Popen(
            ["bash", "-c", moved, "chromium", CHROMIUM, *flags],
            pass_fds=(to_read, from_write), stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(from_read, to_write)
    finally:
        with suppress(OSError):
            os.write(to_write, b'{"id": 0, "method": "Browser.close"}\0')
        os.close(to_write)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        os.close(from_read)
