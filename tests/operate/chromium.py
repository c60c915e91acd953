"""Headless Chromium for tests, over the pipe of its DevTools: no port, no driver, no network."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --disable-dev-shm-usage --hide-scrollbars "
    "--force-color-profile=srgb --remote-debugging-pipe"
)
_PLACE = """(() => { const box = document.querySelector(%s).getBoundingClientRect();
return { x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height }; })()"""

PATIENCE = 60.0
"""Seconds that an answer may take."""


class Page:
    """A tab: what it is told, and what it says."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._buffer, self._number = to_browser, from_browser, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "Chromium has ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, place: Path | str, width: int, height: int, *, dark: bool = False, scripts: bool = True) -> None:
        """Load a file or an address in a window of this size, in CSS pixels."""
        scheme = "dark" if dark else "light"
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path | None = None, *, whole: bool = False, selector: str | None = None) -> Picture:
        """What the window shows, or the whole page, or one element."""
        clip = {} if selector is None else {"clip": {**self.evaluate(_PLACE % json.dumps(selector)), "scale": 1}}
        beyond = whole or selector is not None
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=beyond, **clip)
        data = base64.b64decode(answer["data"])
        if path is not None:
            path.write_bytes(data)
        return Picture(data)

    def problems(self) -> list[str]:
        """Exceptions, and what console and browser call errors or warnings."""
        entries = [event["params"] for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        for event in self.events:
            entry = event["params"].get("entry", event["params"])
            if event["method"] == "Log.entryAdded" and entry["level"] in ("error", "warning"):
                entries.append(entry)
            if event["method"] == "Runtime.consoleAPICalled" and entry["type"] in ("error", "warning", "assert"):
                entries.append(entry)
        return [json.dumps(entry) for entry in entries]

    def requests(self) -> list[str]:
        """Addresses that were asked for, data in the page itself apart."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        addresses = [event["params"]["request"]["url"] for event in sent]
        return [address for address in addresses if not address.startswith("data:")]


class Picture:
    """A PNG."""

    def __init__(self, data: bytes) -> None:
        self._pixels_HW3 = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    def colours(self, every: int = 3) -> dict[bytes, int]:
        """How often each colour is there, red, green and blue, in every so manieth pixel of every so manieth row."""
        pixels_N3 = self._pixels_HW3[::every, ::every].reshape(-1, 3)
        return Counter(map(np.ndarray.tobytes, pixels_N3))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own in the folder; ends with the block. Its absence is a failure."""
    program = shutil.which("chromium")
    assert program is not None, "Chromium is not installed: apt-get install chromium"
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    command = f"exec {shlex.quote(program)} {SWITCHES} --user-data-dir={shlex.quote(str(folder / 'profile'))}"
    process = subprocess.Popen(
        ["bash", "-c", f"{command} 3<&{to_read} 4>&{from_write}"],
        pass_fds=(to_read, from_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(to_write, from_read)
    finally:
        os.close(to_write)
        os.close(from_read)
        process.terminate()
        process.wait(timeout=PATIENCE)
