"""A real headless browser: Chromium by ChromeDriver, spoken to in the WebDriver protocol (W3C), without a package."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PHONE, DESKTOP = 390, 1280  # CSS pixels across
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Browser:
    """One window of a fixed width."""

    def __init__(self, driver: str, width: int) -> None:
        self._driver = driver
        metrics = {"width": width, "height": 844, "pixelRatio": 1, "mobile": width < 600}
        options = {"args": list(_FLAGS), "mobileEmulation": {"deviceMetrics": metrics}}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"

    def open(self, address: str) -> None:
        """Load a page and wait for it."""
        self._send("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str) -> Any:
        """Return what a JavaScript function body returns."""
        return self._send("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def wait(self, script: str, seconds: float = 60.0) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"return {script};"):
            assert time.monotonic() < end, f"not true after {seconds} s: {script}"
            time.sleep(0.1)

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return int(self.run("return document.documentElement.scrollWidth - window.innerWidth;"))

    def complaints(self) -> list[str]:
        """Return the warnings and errors of the console: broken scripts, refusals of the content security policy."""
        lines = self._send("POST", f"{self._session}/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] in ("WARNING", "SEVERE")]

    def save_picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self._send("GET", f"{self._session}/screenshot")))

    def close(self) -> None:
        """End the window."""
        self._send("DELETE", self._session)

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]


@contextmanager
def open_browser(width: int) -> Iterator[Browser]:
    """Start a browser; skip the test where Chromium or ChromeDriver is not installed."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("Chromium is not installed (Debian: apt install chromium chromium-driver)")
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        port = next(line.rpartition("port ")[2].strip(" .\n") for line in driver.stdout if "started" in line)
        browser = Browser(f"http://127.0.0.1:{port}", width)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(timeout=30)
