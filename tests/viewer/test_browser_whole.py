"""The viewer as a whole: live, hostile text, phones, accessibility."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers.episode_runs import make_run
from helpers.viewers import Watched, browsing, serving

pytest.importorskip("starlette")
pytest.importorskip("playwright")

if TYPE_CHECKING:
    from playwright.sync_api import Browser

AXE = Path(__file__).parent / "axe" / "axe.min.js"
LONG = 1_000_000
HOSTILE = (
    '<script>document.title = "pwned"</script> "><img src=x onerror="document.title=1"> <svg onload=alert(1)> '
    '<a href="javascript:alert(1)">x</a> <style>*{display:none}</style> &lt;b&gt; ]]> ${alert(1)} '
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x00 \u202egnirts desrever\u202c \u200b\ufeff \ud800 " + "x" * LONG
)
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
WIDE = {"viewport": {"width": 1280, "height": 800}}
TOKENS = "episode?n=9&view=tokens&colour=advantage&token=14"
PAGES = (
    "overview", "episodes", "step?step=0", "group?group=0", "group?group=1", "episode?n=9", "episode?n=9&view=tokens",
    "episode?n=9&view=tokens&colour=advantage&token=14", "compare",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    runs = [make_run(folder / "first", 128, hostile=HOSTILE), make_run(folder / "second", 128, seed=7)]
    with serving(runs) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


def test_hostile_text_is_shown_and_does_nothing(browser: Browser, base: str) -> None:
    context = browser.new_context(**WIDE)
    seen = Watched(context, base)
    for where in ("overview", "episodes?order=oldest", "step?step=0", "group?group=0", "episode?n=0", "compare?step=0"):
        page = seen.open(where)
        inside = page.evaluate(
            "[...document.querySelectorAll('main script, main img, main style, main iframe')].length"
        )
        assert inside == 0, where
        assert page.evaluate("[...document.querySelectorAll('main a')].every(a => a.protocol === 'http:')")
        assert page.title().endswith("first") and "pwned" not in page.title()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), where
    page = seen.open("episode?n=0")
    text = page.locator(".message.user").first.inner_text()
    assert '<script>document.title = "pwned"</script>' in text and "${alert(1)}" in text
    assert {"ESC", "NUL", "BEL", "RLO", "ZWSP", "U+FEFF", "U+202C"} <= set(page.locator(".odd").all_inner_texts())
    assert len(text) < 20_000
    more = page.locator(".message.user .more").first
    assert "characters left" in more.inner_text()
    more.click()
    assert len(page.locator(".message.user").first.inner_text()) > 60_000
    context.close()
    assert seen.wrong == []


def test_no_string_can_be_read_as_html_even_by_a_mistake_of_ours(browser: Browser, base: str) -> None:
    context = browser.new_context(**WIDE)
    page = Watched(context, base).open("overview")
    for code in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "new DOMParser().parseFromString('<b>x</b>', 'text/html')",
        "document.write('<b>x</b>')",
    ):
        assert page.evaluate(f"() => {{ try {{ {code} }} catch (error) {{ return error.name }} }}") == "TypeError", code
    context.close()


def test_what_a_running_run_writes_appears_by_itself(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "live", 64, eval_every=0)
    with serving([folder]) as base:
        context = browser.new_context(**WIDE)
        seen = Watched(context, base)
        other = Watched(context, base)
        list_page = other.open("episodes")
        page = seen.open("overview")
        points = page.locator(".page > section:nth-of-type(2)").inner_html()
        make_run(folder, 64, eval_every=0, seed=3)
        page.bring_to_front()
        page.wait_for_function("() => document.querySelector('#live').dataset.state === 'fresh'")
        page.wait_for_function("() => document.querySelector('.head-text p').textContent.includes('128 episodes')")
        assert page.locator(".page > section:nth-of-type(2)").inner_html() != points
        list_page.bring_to_front()
        list_page.get_by_role("button", name="64 new episodes: show").click()
        list_page.wait_for_function("() => document.querySelector('.head-text p').textContent.includes('128 episodes')")
        assert seen.wrong == other.wrong == []
    page.bring_to_front()
    page.wait_for_selector("#live:has-text('no server')")
    context.close()


@pytest.mark.parametrize("where", PAGES)
def test_a_phone_shows_every_page_without_scrolling_sideways(browser: Browser, base: str, where: str) -> None:
    context = browser.new_context(**PHONE)
    seen = Watched(context, base)
    page = seen.open(where)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    small = page.evaluate("""[...document.querySelectorAll('main button, main select, .top a, .top button')]
      .filter(e => e.offsetParent && e.getBoundingClientRect().height < 24 && !e.matches('.visually-hidden'))
      .map(e => e.outerHTML.slice(0, 80))""")
    assert small == []
    context.close()
    assert seen.wrong == []


def test_filters_on_a_phone_open_on_demand(browser: Browser, base: str) -> None:
    context = browser.new_context(**PHONE)
    page = Watched(context, base).open("episodes")
    assert not page.get_by_role("combobox", name="Order").is_visible()
    page.get_by_role("button", name="Filters and order").tap()
    page.get_by_role("combobox", name="Order").select_option("-reward")
    page.wait_for_function("() => location.hash.includes('order=-reward')")
    context.close()


LOOKS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("light", WIDE, ("overview", "episodes", "step?step=0", "group?group=1", "episode?n=9", TOKENS, "compare")),
    ("dark", WIDE, ("overview", "step?step=0", "episode?n=9", TOKENS)),
    ("light", PHONE, ("episodes", "group?group=1")),
]


@pytest.mark.parametrize(("scheme", "size", "pages"), LOOKS, ids=["light", "dark", "phone"])
def test_axe_finds_nothing_serious(
    browser: Browser, base: str, scheme: Any, size: dict[str, Any], pages: Sequence[str]
) -> None:
    # The page's policy lets no string become HTML, which axe itself does: it is lifted for this test.
    context = browser.new_context(color_scheme=scheme, bypass_csp=True, reduced_motion="reduce", **size)
    seen = Watched(context, base)
    found = []
    for where in pages:
        page = seen.open(where)
        if where == "overview":
            page.get_by_role("heading", name="All metrics").scroll_into_view_if_needed()
            page.wait_for_selector(".metric svg")
        if page.evaluate("typeof axe") == "undefined":
            page.evaluate(AXE.read_text(encoding="utf-8"))
        result = page.evaluate("axe.run({ resultTypes: ['violations'] })")
        found += [
            f"{where}: {rule['id']} ({rule['impact']}): {rule['nodes'][0]['html'][:160]}"
            for rule in result["violations"]
            if rule["impact"] in ("serious", "critical")
        ]
    context.close()
    assert found == []
