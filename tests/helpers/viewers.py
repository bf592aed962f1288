"""A viewer's server in a thread, and a browser to look at it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envgrad.viewer.app import build_app
from envgrad.viewer.serve import ViewAddress, run_places
from envgrad.viewer.source import RunSource

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

TOKEN = "0123456789abcdef"


@contextmanager
def serving(folders: Sequence[Path]) -> Iterator[str]:
    """The viewer of these runs on a free port; its address."""
    import uvicorn

    sources = [RunSource(place) for place in run_places(folders)]
    address = ViewAddress(port=0, token=TOKEN)
    listener = address.listen()
    app = build_app(sources, token=address.secret(), hosts=address.names(), any_address=False)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/{TOKEN}/"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()
        for source in sources:
            source.close()


@contextmanager
def browsing() -> Iterator[Browser]:
    """A headless Chromium of this machine; tests skip where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page that keeps what went wrong in it: errors, warnings, and requests to anywhere else."""

    def __init__(self, context: BrowserContext, base: str) -> None:
        self.base = base
        self.wrong: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda message: self._say(message.type, message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def _say(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.wrong.append(f"{kind}: {text}")

    def _asked(self, url: str) -> None:
        if not url.startswith((self.base, "about:", "data:")):
            self.wrong.append(f"request to {url}")

    def open(self, where: str) -> Page:
        """Open a page by its part of the address after ``#/``, and wait until it is there."""
        self.page.goto(f"{self.base}#/{where}")
        self.settle()
        return self.page

    def settle(self) -> None:
        self.page.wait_for_selector("main:not([aria-busy]) h1")
