"""Headless Chromium (Debian's), driven by Playwright, and servers of pages on loopback.

Example:

    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", PORT]
    with serve(command) as url, browse() as browser:
        page = browser.open(url)
        page.get_by_text("version_0").first.wait_for()
        browser.shoot(page, folder / "page.webp")
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np

from tests.helpers.spawn import free_port

_START_S = 120.0
PORT = "{port}"  # a word of a server's command that holds this gets a free port there
_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",  # it looks up its maker's hosts otherwise
    "--disable-component-update",
    "--disable-sync",
)


def missing() -> str | None:
    """Say what of a browser is not on this machine; None where it can run."""
    if which("chromium") is None:
        return "chromium is not installed (Debian: chromium)"
    return None if find_spec("playwright") else "playwright is not installed"


class Browser:
    """Pages in a browser of its own.

    Attributes:
        engine: Playwright's browser.
        errors: what the scripts of the pages raised, and their messages of level "error".
        asked: the addresses that the pages asked for.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.errors: list[str] = []
        self.asked: list[str] = []

    def open(self, url: str, *, phone: bool = False, dark: bool = False, width: int = 1280, height: int = 800) -> Any:
        """Open a page in a profile of its own (cookies, storage), as wide as a desktop's window or a phone.

        Returns:
            Playwright's page, loaded; what its scripts fill in later is waited for by its locators.
        """
        context = self.engine.new_context(
            viewport={"width": 390, "height": 844} if phone else {"width": width, "height": height},
            device_scale_factor=2 if phone else 1,
            is_mobile=phone,
            has_touch=phone,
            color_scheme="dark" if dark else "light",
        )
        context.set_default_timeout(30_000)
        page = context.new_page()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(url)
        return page

    def close(self) -> None:
        """Close the pages."""
        for context in self.engine.contexts:
            context.close()

    @staticmethod
    def wait_drawn(locator: Any, share: float) -> None:
        """Wait until something coloured, such as a curve, is drawn in more than a share of an element's width.

        A page has the element, its canvas too, some frames before it draws in it.
        """
        from PIL import Image  # late, as below

        deadline = time.monotonic() + 30.0
        drawn = 0.0
        while drawn <= share:
            assert time.monotonic() < deadline, f"drawn in {drawn:.2f} of the width after 30 s, not in {share}"
            colours = np.asarray(Image.open(io.BytesIO(locator.screenshot())).convert("RGB")).astype(int)
            drawn = float(((colours.max(-1) - colours.min(-1)) > 20).any(0).mean())

    @staticmethod
    def shoot(page: Any, path: Path, *, whole: bool = False, most_bytes: int = 150_000) -> Path:
        """Keep a picture of a page, by the file's ending as PNG of 256 colours or WebP.

        Args:
            page: what `open` gave.
            path: the file to write.
            whole: with what is below the window's edge.
            most_bytes: WebP gets coarser until the file is no larger.
        """
        from PIL import Image  # late: comes with what the pages need

        image = Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
            return path
        for quality in (85, 70, 55, 40, 25):
            image.save(path, quality=quality, method=6)
            if path.stat().st_size <= most_bytes:
                break
        return path


@contextmanager
def browse() -> Iterator[Browser]:
    """Start a browser, and close it with all its pages."""
    from playwright.sync_api import sync_playwright  # late: only tests of pages have it

    flags = [*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        engine = playwright.chromium.launch(executable_path=which("chromium"), args=flags)
        try:
            yield Browser(engine)
        finally:
            engine.close()


@contextmanager
def serve(
    command: Sequence[str | os.PathLike[str]],
    path: str = "/",
    env: Mapping[str, str] | None = None,
    ready: Callable[[str], bool] | None = None,
) -> Iterator[str]:
    """Run a server until its address answers, and end it afterwards.

    Args:
        command: its words; `PORT` in one of them becomes a free port of loopback.
        path: what is asked for, to see that it answers.
        env: variables beside this process's.
        ready: another way to see that it answers, given its address.

    Yields:
        Its address, without a slash at the end.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = [os.fspath(word).replace(PORT, str(port)) for word in command]
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # some start processes of their own, which end with the group
        )
        try:
            deadline = time.monotonic() + _START_S
            while not (answers(url + path) if ready is None else ready(url)):
                if server.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise AssertionError(f"no answer from {words} ({server.poll()}):\n{output.read().decode()}")
                time.sleep(0.05)
            yield url
        finally:
            _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=20)


def answers(url: str) -> bool:
    """Return whether a server sends something for an address, be it an error's page."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
