"""Chromium for tests, driven by its own protocol over two pipes: real widths, colour schemes and keys."""

import json
import os
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="a page's script needs a browser: install chromium")

WIDTHS, SCHEMES = (480, 1280), ("light", "dark")

_KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39, "ArrowLeft": 37}


class Page:
    """One tab of a browser."""

    def __init__(self, send: int, received: int) -> None:
        self._send, self._received, self._rest, self._number = send, received, b"", 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self._call("Page.enable")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" not in self._rest:
                chunk = os.read(self._received, 1 << 16)
                assert chunk, "the browser has ended"
                self._rest += chunk
            message, _, self._rest = self._rest.partition(b"\0")
            yield json.loads(message)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        said = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._send, json.dumps(said).encode() + b"\0")
        answer = next(each for each in self._messages() if each.get("id") == self._number)
        assert "error" not in answer, f"{method}: {answer}"
        return dict(answer["result"])

    def open(
        self, file: Path, width: int = 1280, scheme: str = "light", fragment: str = "", *, forced: str = "none",
        script: bool = True,
    ) -> None:  # fmt: skip
        """Load a file at a width in pixels and in a colour scheme.

        Args:
            fragment: the part of the address that follows #.
            forced: `active` for the few colours of a system with high contrast.
            script: False for a browser whose user has switched JavaScript off.
        """
        self._call("Emulation.setScriptExecutionDisabled", value=not script)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = {"prefers-color-scheme": scheme, "forced-colors": forced}
        self._call("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=file.as_uri() + fragment)
        next(each for each in self._messages() if each.get("method") == "Page.loadEventFired")
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            pass

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, which may call what a browser's console has."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, includeCommandLineAPI=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, as a person does, on the element that has the focus."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        codes = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": _KEYS[key]}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **codes)
        self._call("Input.dispatchKeyEvent", type="keyUp", **codes)

    def picture(self, file: Path) -> None:
        """Write a picture of the whole page as PNG."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(b64decode(found["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start Chromium with a new profile in `folder`, open a tab, and end Chromium afterwards."""
    (to_read, send), (received, to_write) = os.pipe(), os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder / 'profile'}",
             "--remote-debugging-pipe"]  # fmt: skip
    # The browser reads its commands from descriptor 3 and answers on descriptor 4.
    words = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", str(PROGRAM), *flags]
    running = subprocess.Popen(words, pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL)
    os.close(to_read)
    os.close(to_write)
    try:
        yield Page(send, received)
    finally:
        os.close(send)
        os.close(received)
        running.terminate()
        running.wait(30)
