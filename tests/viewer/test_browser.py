"""Every function of the viewer, clicked through in a headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envgrad.episodes import EpisodeFilter, EpisodeReader
from envgrad.episodes.log import EpisodeLog
from helpers.episode_runs import make_run
from helpers.viewers import Watched, browsing, serving

pytest.importorskip("starlette")
pytest.importorskip("playwright")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EPISODES = 384


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = [make_run(folder / "first", EPISODES), make_run(folder / "second", EPISODES, seed=7)]
    log = EpisodeLog(made[0] / "episodes")
    for step in range(1, 5):
        log.metrics(step, {"share/decode": 0.1 * step, "share/idle": 0.2})
    log.close()
    return made


@pytest.fixture(scope="module")
def base(runs: list[Path]) -> Iterator[str]:
    with serving(runs) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def seen(browser: Browser, base: str) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    watched = Watched(context, base)
    yield watched
    context.close()
    assert watched.wrong == []


def wait_url(page: Page, part: str) -> None:
    page.wait_for_function("part => location.hash.includes(part)", arg=part)


def test_the_overview_draws_a_curve_for_each_environment_and_hides_one_by_its_legend(seen: Watched) -> None:
    page = seen.open("overview")
    curves = page.locator(".page > section:nth-of-type(2) .curve")
    assert curves.count() == 6  # three environments, trained and evaluated
    page.get_by_role("button", name="chess", exact=True).click()
    wait_url(page, "hide=chess")
    assert curves.count() == 5
    page.reload()
    seen.settle()
    assert curves.count() == 5
    page.get_by_role("button", name="Smoother").click()
    wait_url(page, "smooth=0.9")
    assert page.evaluate("() => document.activeElement.textContent") == "Smoother"  # drawn anew, and still in focus
    assert page.locator(".page > section:nth-of-type(2) .raw").count() >= 2
    assert page.title() == "Overview · first"


def test_the_chart_names_figures_under_the_cursor_and_opens_the_step(seen: Watched) -> None:
    page = seen.open("overview")
    chart = page.get_by_role("group", name=re.compile("Mean reward by environment"))
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    note = chart.locator(".chart-note")
    assert re.match(r"step \d+", note.inner_text()) and "compass" in note.inner_text()
    chart.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert note.inner_text().startswith("step 1")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Step 1')")


def test_metrics_are_drawn_and_filtered_by_name(seen: Watched) -> None:
    page = seen.open("overview")
    page.get_by_role("heading", name="All metrics").scroll_into_view_if_needed()
    page.wait_for_selector(".metric svg")
    assert page.locator(".metric:visible").count() == 5
    page.get_by_role("heading", name="share", exact=True).click()
    wait_url(page, "open=share")
    page.wait_for_selector(".metric-section .metric svg")
    page.reload()
    seen.settle()
    page.get_by_role("heading", name="All metrics").scroll_into_view_if_needed()
    page.wait_for_selector(".metric-section .metric svg")
    assert page.locator(".metric:visible").count() == 7
    page.get_by_label("Filter metrics by name").fill("LOSS")
    page.wait_for_function("() => document.querySelectorAll('.metric').length === 1")
    wait_url(page, "metric=LOSS")
    page.get_by_label("Filter metrics by name").fill("nothing like it")
    page.wait_for_selector("text=No metric has this in its name")


def test_failed_episodes_are_one_click_away_with_their_words(seen: Watched) -> None:
    page = seen.open("overview")
    page.locator("a.tile", has_text="Failed episodes").click()
    wait_url(page, "failed=true")
    page.wait_for_selector(".rows tbody tr")
    assert set(page.locator(".rows .reward").all_inner_texts()) == {"failed"}
    page.locator(".rows tbody tr").first.click()
    page.wait_for_selector("h1:has-text('Episode')")
    failure = page.get_by_role("region", name="Failure").inner_text()
    assert "Failed: environment" in failure and "the browser crashed" in failure


def test_filters_search_and_order_change_the_list_and_live_in_the_address(seen: Watched) -> None:
    page = seen.open("episodes")
    status = page.get_by_role("status").filter(has_text="episode").last
    whole = status.inner_text()
    page.get_by_role("combobox", name="Environment").select_option("chess")
    wait_url(page, "environment=chess")
    page.get_by_role("spinbutton", name="Lowest reward").fill("1.2")
    wait_url(page, "min=1.2")
    page.get_by_role("combobox", name="Order").select_option("reward")
    wait_url(page, "order=reward")
    page.wait_for_function("() => document.querySelector('.rows .reward')?.textContent === '1.2'")
    rewards = [float(text) for text in page.locator(".rows .reward").all_inner_texts()]
    assert rewards == sorted(rewards) and min(rewards) >= 1.2
    address = page.url
    shown = page.locator(".rows tbody tr").count()
    page.goto("about:blank")
    page.goto(address)
    seen.settle()
    assert page.locator(".rows tbody tr").count() == shown
    assert page.get_by_role("spinbutton", name="Lowest reward").input_value() == "1.2"
    page.get_by_role("combobox", name="End").select_option("max_turns")
    wait_url(page, "stop=max_turns")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.rows .tag')].every(e => !['done','answer'].includes(e.textContent))"
    )
    page.get_by_role("button", name="Clear filters").click()
    page.wait_for_function("text => document.querySelector('.head-text [role=status]').textContent === text", arg=whole)


def test_text_search_finds_the_task_and_says_so_where_nothing_fits(seen: Watched) -> None:
    page = seen.open("episodes")
    page.keyboard.press("/")
    page.keyboard.type('"Task 17"')
    wait_url(page, "text=")
    page.wait_for_function("() => document.querySelectorAll('.rows tbody tr').length === 8")
    assert all("Task 17" in text for text in page.locator(".what-link").all_inner_texts())
    page.get_by_label("Search in prompts").fill("zebra")
    page.wait_for_selector("text=No episode fits")
    assert page.get_by_label("Search in prompts").evaluate("e => e === document.activeElement")


def test_pages_of_the_list_are_turned_and_rows_walked_by_keys(seen: Watched) -> None:
    page = seen.open("episodes?order=oldest")
    first = page.locator(".what-link").first.get_attribute("href")
    page.keyboard.press("]")
    wait_url(page, "offset=50")
    page.wait_for_selector("text=51 to 100")
    assert page.locator(".what-link").first.get_attribute("href") != first
    page.keyboard.press("[")
    page.wait_for_selector("text=1 to 50")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Episode')")
    assert page.evaluate("location.hash") == first
    page.go_back()
    page.wait_for_selector(".rows")


def test_a_step_shows_its_groups_with_siblings_as_columns(seen: Watched) -> None:
    page = seen.open("step?step=2")
    group = page.locator(".group").first
    tiles = group.locator(".sibling")
    assert tiles.count() == 8
    boxes = [tile.bounding_box() for tile in tiles.all()]
    assert len({box["y"] for box in boxes if box}) == 1
    assert [box["x"] for box in boxes if box] == sorted(box["x"] for box in boxes if box)
    page.get_by_role("combobox", name="Order").select_option("low")
    wait_url(page, "sort=low")
    page.wait_for_selector("main:not([aria-busy])")
    means = [float(re.search(r"mean (\S+),", text)[1]) for text in page.locator(".group .panel-head").all_inner_texts()]
    assert means == sorted(means)
    page.keyboard.press("]")
    page.wait_for_selector("h1:has-text('Step 3')")
    page.get_by_label("Previous step").click()
    page.wait_for_selector("h1:has-text('Step 2')")
    page.get_by_role("combobox", name="Environment").select_option("numbers")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.group h2')].every(e => e.textContent.startsWith('numbers'))"
    )


def test_an_evaluation_s_step_is_its_own_split(seen: Watched) -> None:
    page = seen.open("step?step=4")
    page.get_by_role("button", name="eval", exact=True).click()
    wait_url(page, "split=eval")
    page.wait_for_selector("text=4 groups")
    assert page.locator(".group").first.locator(".sibling").count() == 2


def test_a_group_s_siblings_stand_side_by_side_and_lead_on(seen: Watched) -> None:
    page = seen.open("step?step=1")
    page.get_by_role("link", name=re.compile("Siblings side by side")).first.click()
    page.wait_for_selector(".column")
    columns = page.locator(".column")
    assert columns.count() == 8
    tops = {box["y"] for box in (column.bounding_box() for column in columns.all()) if box}
    assert len(tops) == 1
    name = page.locator("h1").inner_text()
    page.keyboard.press("]")
    page.wait_for_function("name => document.querySelector('h1').textContent !== name", arg=name)
    page.keyboard.press("u")
    page.wait_for_selector("h1:has-text('Step 1')")


def test_an_episode_is_a_conversation_with_calls_results_and_rewards(seen: Watched) -> None:
    page = seen.open("episodes?environment=compass&failed=false&order=-tokens")
    page.locator(".rows tbody tr").first.click()
    page.wait_for_selector(".chat")
    assert page.locator(".chat .role").all_inner_texts()[:3] == ["system", "user", "turn 1"]
    call = page.locator(".call").first
    assert call.locator(".call-name").inner_text() == "move"
    assert call.locator("dt").inner_text() == "direction"
    assert call.locator("dd").inner_text() in ("north", "south", "east", "west")
    assert "You see a" in call.locator(".result").inner_text()
    assert page.locator(".message.assistant .message-head").first.inner_text().count("reward +0.1") == 1
    side = page.get_by_role("complementary", name="Figures").inner_text()
    assert "compass" in side and "seed" in side and "Time:" in side
    address = page.url
    key = "]" if page.get_by_label("Next sibling: none").count() == 0 else "["
    page.keyboard.press(key)
    page.wait_for_function("url => location.href !== url", arg=address)
    page.keyboard.press("u")
    page.wait_for_selector(".column")


def test_tokens_are_coloured_walked_and_linked(seen: Watched) -> None:
    page = seen.open("episodes?split=train&failed=false&use=trained&order=-advantage")
    page.locator(".rows tbody tr").first.click()
    page.wait_for_selector(".chat")
    page.keyboard.press("t")
    page.wait_for_selector(".tok")
    wait_url(page, "view=tokens")
    assert page.locator(".tok.given").count() > 12
    assert page.locator(".tok.low").count() == page.locator(".tok:not(.given)").count()  # log-prob
    page.keyboard.press("c")
    wait_url(page, "colour=ratio")
    page.wait_for_selector(".tok.high")
    assert page.locator(".tok.low").count() > 0
    page.get_by_role("button", name="Advantage").click()
    wait_url(page, "colour=advantage")
    page.wait_for_function("() => document.querySelectorAll('.tok.low').length === 0")
    page.locator(".tok:not(.given)").nth(2).hover()
    panel = page.locator(".token-panel").inner_text()
    assert all(word in panel for word in ("log-prob", "ratio", "advantage", "policy", "sampled, trained"))
    page.locator(".tok:not(.given)").nth(2).click()
    wait_url(page, "token=14")
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    wait_url(page, "token=15")
    page.reload()
    seen.settle()
    assert page.locator(".tok.on").get_attribute("data-at") == "15"


def test_further_chats_of_an_episode_are_chosen_by_row(seen: Watched, runs: list[Path]) -> None:
    with EpisodeReader(runs[0]) as reader:
        numbers = [row.number for row in reader.rows(EpisodeFilter(failed=False), limit=None)]
        number = next(one.summary.number for one in reader.episodes(numbers) if len(one.rows) > 1)
    page = seen.open(f"episode?n={number}&view=tokens")
    page.get_by_role("combobox", name="Row").select_option("1")
    wait_url(page, "row=1")
    page.wait_for_function("() => document.querySelectorAll('.tok').length === 14")


def test_two_runs_are_compared_by_curves_figures_and_the_same_tasks(seen: Watched) -> None:
    page = seen.open("compare")
    assert page.locator(".curve").count() == 6 and page.locator(".curve.dashed").count() == 3
    page.get_by_role("combobox", name="Environment").select_option("chess")
    wait_url(page, "environment=chess")
    page.wait_for_function("() => document.querySelectorAll('.curve').length === 2")
    row = page.get_by_role("row", name=re.compile("^learning_rate"))
    assert row.inner_text().split() == ["learning_rate", "0.001", "0.001", "0"]
    page.wait_for_selector(".pair")
    assert page.locator(".pair").first.locator(".pair-marks").count() == 2  # the same task in both
    page.keyboard.press("[")
    wait_url(page, "step=")
    page.locator(".pair-side:has(.side-b) .mark-link").first.click()
    page.wait_for_selector(".chat, .error-box")
    wait_url(page, "run=b")
    assert page.locator("#run-name").inner_text() == "second"
    page.get_by_role("link", name="Overview").click()
    page.wait_for_selector("h1:has-text('Overview')")
    assert page.get_by_role("button", name="second").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="first").click()
    page.wait_for_function("() => document.querySelector('#run-name').textContent === 'first'")


def test_keys_lead_everywhere_and_are_listed(seen: Watched) -> None:
    page = seen.open("overview")
    for key, heading in (("s", "Step"), ("e", "Episodes"), ("c", "Two runs"), ("o", "Overview")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_selector(f"h1:has-text('{heading}')")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    listed = page.locator("dialog kbd").all_inner_texts()
    assert {"/", "j", "k", "[", "]", "u", "t", "c", "d", "?", "Esc"} <= set(listed)
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog:not([open])", state="attached")


def test_dark_follows_the_system_and_the_button_is_remembered(browser: Browser, base: str) -> None:
    context = browser.new_context(color_scheme="dark")
    seen = Watched(context, base)
    page = seen.open("overview")
    dark = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(dark) == "rgb(19, 21, 25)"
    page.get_by_role("button", name="Change between dark and light").click()
    assert page.evaluate(dark) == "rgb(250, 249, 247)"
    page.reload()
    seen.settle()
    assert page.evaluate(dark) == "rgb(250, 249, 247)"
    page.keyboard.press("d")
    assert page.evaluate(dark) == "rgb(19, 21, 25)"
    context.close()
    assert seen.wrong == []


def test_an_address_that_leads_nowhere_says_so_and_leads_back(browser: Browser, base: str) -> None:
    context = browser.new_context()
    seen = Watched(context, base)
    page = seen.open("episode?n=999999")
    assert "999999" in page.locator("main").inner_text()
    page.get_by_role("link", name="Go to the overview").click()
    page.wait_for_selector("h1:has-text('Overview')")
    context.close()
    assert [wrong for wrong in seen.wrong if "400" not in wrong] == []
