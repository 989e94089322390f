"""A headless Chromium that stays open for several pages, driven through its debugging pipe.

Phone widths, the dark scheme, screenshots and timings are not to be had from a command line alone.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from browser import BROWSER

# True once every chart of the page that is not hidden has been drawn.
DRAWN = """(() => {
  const plots = [...document.querySelectorAll(".plot")].filter((one) => !one.hidden);
  return document.readyState === "complete" && plots.every((one) => one.dataset.rendered === "true");
})()"""


class Chromium:
    """``with Chromium(folder) as browser: tab = browser.open(page, width=390, dark=True)``."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._send = os.pipe()
        self._receive, from_browser = os.pipe()
        # Out of the way of the numbers that the browser expects.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 50) for fd in (to_browser, from_browser)]
        os.close(to_browser)
        os.close(from_browser)

        def place() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += ["--disable-component-update", "--disable-sync", "--remote-debugging-pipe", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [str(BROWSER), *flags, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place,
        )
        for fd in theirs:
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._send)
        os.close(self._receive)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        until = time.monotonic() + 120
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._receive, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        value: dict[str, Any] = json.loads(message)
        return value

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False, wait: str = DRAWN) -> Tab:
        """A page in a tab of its own, once ``wait``, an expression, is true. Below 500 pixels it is a phone's."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable", session)
        # The main thread's own time: what other programs on the machine do not stretch.
        self.call("Performance.enable", session, timeDomain="threadTicks")
        tab = Tab(self, session, target)
        tab.set_dark(dark)
        tab.set_width(width, height)
        self.call("Page.navigate", session, url=page.as_uri())
        tab.wait(wait)
        return tab


class Tab:
    """An open page."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self._browser.call(
            "Runtime.evaluate", self._session, expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 300) -> None:
        """Until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(expression):
            if time.monotonic() > until:
                raise TimeoutError(f"not true after {seconds} s: {expression}")
            time.sleep(0.05)

    def set_width(self, width: int, height: int = 900) -> None:
        """The screen; below 500 pixels it is a phone's."""
        phone = width < 500
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._browser.call("Emulation.setDeviceMetricsOverride", self._session, **screen)
        self._browser.call("Emulation.setTouchEmulationEnabled", self._session, enabled=phone)

    def set_dark(self, dark: bool) -> None:
        """What the reader's system asks for."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._browser.call("Emulation.setEmulatedMedia", self._session, features=[scheme])

    @property
    def console(self) -> list[str]:
        """What the page complained of."""
        said = []
        self.run("0")
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                said.append(json.dumps(event["params"]["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                said.append(json.dumps(event["params"]["args"]))
            elif event["method"] == "Log.entryAdded":
                said.append(event["params"]["entry"]["text"])
        return said

    @property
    def busy_seconds(self) -> float:
        """CPU time of the page's main thread since it was opened: parsing, scripts, layout and painting."""
        metrics = self._browser.call("Performance.getMetrics", self._session)["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    @property
    def is_wider(self) -> bool:
        """Whether the page scrolls sideways."""
        return bool(self.run("document.documentElement.scrollWidth > window.innerWidth"))

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """A picture of the page."""
        more: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self._browser.call("Page.getLayoutMetrics", self._session)["cssContentSize"]
            more["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self._browser.call("Page.captureScreenshot", self._session, format="png", **more)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
