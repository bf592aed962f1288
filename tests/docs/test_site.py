"""The documentation as a site: built strictly, read in a headless Chromium, without a request to anywhere else."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from helpers.pages import ROOT, all_pages
from helpers.viewers import Watched, browsing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

AXE = ROOT / "tests" / "viewer" / "axe" / "axe.min.js"
MAIN = ("index", "first_steps", "write_an_environment", "algorithms", "config", "viewer", "architecture")
"""pages that are looked at"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    # No address outside this machine resolves in the build, and a proxy answers nothing.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def base(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in all_pages():
        assert (site / f"{'index' if page == 'README' else page}.html").is_file(), page
    for name in ("architecture", "changes", "results", "examples/compass.py", "examples/first_steps.ipynb"):
        assert (site / f"{name}.html").is_file(), name


def test_nothing_in_it_comes_from_elsewhere(site: Path) -> None:
    """Links may lead anywhere; what a page loads by itself may not."""
    loads = re.compile(r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?(https?:)?//[^>]*>""")
    styles = re.compile(
        r"""<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*href=["']?(?:https?:)?//"""
    )
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not loads.search(text) and not styles.search(text), page
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"(?:@import\s+|url\()[\"']?(?:https?:)?//", text), sheet


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_main_pages_show_themselves_without_an_error(browser: Browser, base: str, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    seen = Watched(context, base)
    for name in MAIN:
        seen.page.goto(f"{base}{name}.html")
        seen.page.wait_for_selector("h1")
        assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    assert seen.page.evaluate("document.body.dataset.mdColorScheme") == ("slate" if scheme == "dark" else "default")
    context.close()
    assert seen.wrong == []


def test_the_search_finds_a_field(browser: Browser, base: str) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    seen = Watched(context, base)
    seen.page.goto(f"{base}index.html")
    seen.page.locator("input.md-search__input").click()
    seen.page.keyboard.type("group_consistency")
    seen.page.wait_for_selector(".md-search-result__item")
    found = seen.page.locator(".md-search-result__item").all_inner_texts()
    assert any("group_consistency" in text for text in found)
    pages = seen.page.locator("a.md-search-result__link").evaluate_all("links => links.map(link => link.href)")
    assert {"config.html", "group_starts.html"} <= {
        page.partition("?")[0].partition("#")[0].rpartition("/")[2] for page in pages
    }
    context.close()
    assert seen.wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, base: str, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    for name in ("first_steps", "config"):
        page.goto(f"{base}{name}.html")
        page.wait_for_selector("h1")
        page.evaluate(AXE.read_text(encoding="utf-8"))
        result = page.evaluate("axe.run({ resultTypes: ['violations'] })")
        grave = [
            (broken["id"], len(broken["nodes"]), broken["nodes"][0]["html"][:120])
            for broken in result["violations"]
            if broken["impact"] in ("serious", "critical")
        ]
        assert not grave, (name, grave)
    context.close()


def test_a_phone_reads_it_without_scrolling_sideways(browser: Browser, base: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    seen = Watched(context, base)
    for name in MAIN:
        seen.page.goto(f"{base}{name}.html")
        seen.page.wait_for_selector("h1")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390, name
    context.close()
    assert seen.wrong == []
