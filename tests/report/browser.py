"""A page in headless Chromium, where one is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def opened(page: Path, profile: Path, width: int, use: str) -> tuple[str, str]:
    """The document after its scripts and ``use``, which replaces ``</body>``, have run, and what the console said."""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", use), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--disable-quic", f"--user-data-dir={profile}"]
    flags += ["--enable-logging=stderr", f"--window-size={width},1000", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [str(BROWSER), *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True, encoding="utf-8"
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
