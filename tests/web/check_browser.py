"""The page in a real browser, by real clicks: `make test-web`.

Not part of `make test`, since it needs Chromium, and axe-core from npm.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from rollbook.app.web import viewing
from rollbook.store import Event, open_book
from rollbook.store.events import EpisodeOpened
from web_book import TOKENIZER, make_book
from web_browser import chromium
from web_screens import PAGES, READY

pytestmark = pytest.mark.anyio

AXE = Path(__file__).parents[2] / "app/web/node_modules/axe-core/axe.min.js"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("browser") / "book"
    make_book(path)
    return path


@asynccontextmanager
async def opened(book: Path, *, width: int = 1280, refusals: int = 0, **context: Any) -> AsyncIterator[Page]:
    """The first page of a viewed book. Leaving it asserts that the browser complained of so many refusals only."""
    async with viewing(book, tokenizer=str(TOKENIZER)) as url, chromium() as browser:
        made = await browser.new_context(viewport={"width": width, "height": 860}, **context)
        page = await made.new_page()
        page.set_default_timeout(30_000)
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        elsewhere: list[str] = []
        page.on(
            "request",
            lambda request: None if request.url.startswith(url.split("/ui")[0]) else elsewhere.append(request.url),
        )
        await page.goto(url)
        await page.wait_for_selector("h1")
        yield page
        refused = [said for said in complaints if "status of 400" in said]  # the browser's own word for what we refuse
        assert len(refused) == refusals
        assert [said for said in complaints if said not in refused] == []
        assert elsewhere == []


async def visit(page: Page, address: str) -> None:
    await page.evaluate("to => { location.hash = to }", address)
    await page.wait_for_function(READY, arg=address)


async def test_a_point_leads_to_its_episodes_and_on_to_tokens(made: Path) -> None:
    async with opened(made) as page:
        assert "key=" not in page.url
        await page.get_by_role("region", name="runs").get_by_role("link", name="math/grpo").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("math/grpo")
        over = page.locator(".plot.can-click .u-over").first
        await over.hover()  # waits until the plot has its size
        box = await over.bounding_box()
        assert box is not None
        await over.click(position={"x": box["width"] * 0.985, "y": box["height"] / 2})
        await page.wait_for_url("**/episodes?version=5*")
        await expect(page.locator(".pager span")).to_contain_text("of")
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**#/episode/**")
        await expect(page.locator(".tokens").first).to_contain_text("The product")
        token = page.locator(".tokens .t").nth(3)
        await token.hover()
        await expect(page.locator(".token-facts").first).to_contain_text("probability")
        await page.get_by_label("Colour tokens by").select_option("version")
        await page.wait_for_url("**colour=version*")
        await expect(page.locator(".tokens .t.v5").first).to_be_visible()
        await page.keyboard.press("Tab")
        await page.locator("h1").click()
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await expect(page.locator("article.at")).to_have_attribute("aria-label", "call 2")


async def test_lists_are_filtered_and_sorted(made: Path) -> None:
    async with opened(made, refusals=1) as page:
        await visit(page, "#/run/math%2Fgrpo/episodes")
        await expect(page.locator(".pager span")).to_have_text("1–96 of 96")
        await page.get_by_label("Only episodes where").fill("reward > 0 and n_interactions > 2")
        await page.get_by_role("button", name="Filter").click()
        await page.wait_for_url("**where=*")
        await expect(page.locator(".pager span")).not_to_have_text("1–96 of 96")
        await page.get_by_role("button", name="reward").click()
        await page.wait_for_url("**sort=-reward*")
        await expect(page.locator("th[aria-sort=descending]")).to_contain_text("reward")
        await page.get_by_label("Only episodes where").fill("no_such > 1")
        await page.get_by_role("button", name="Filter").click()
        await expect(page.get_by_role("alert")).to_contain_text("no_such")


async def test_sql_is_answered_drawn_and_refused(made: Path) -> None:
    async with opened(made) as page:
        await page.get_by_role("link", name="SQL").click()
        await page.get_by_label("One SELECT").fill(
            "select version, avg(reward) as reward from episodes where run_id = 'math/grpo' group by 1 order by 1"
        )
        await page.keyboard.press("Control+Enter")
        await expect(page.get_by_role("region", name="answer").locator("tbody tr")).to_have_count(6)
        await expect(page.locator(".plot canvas")).to_be_visible()
        address = page.url
        await page.get_by_role("link", name="Runs").click()
        await page.goto(address)
        await expect(page.get_by_role("region", name="answer").locator("tbody tr")).to_have_count(6)


async def test_hostile_words_are_only_words(made: Path) -> None:
    async with opened(made) as page:
        await page.evaluate("() => { location.hash = '#/episode/ep_hostile' }")
        await expect(page.locator(".said").first).to_contain_text("<script>window.pwned=1</script>")
        await page.get_by_role("link", name="hostile/").first.click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text("<script>")
        for tab in ("Episodes", "Groups", "Discards and failures", "Engine and trainer"):
            await page.get_by_role("navigation", name="of this run").get_by_role("link", name=tab).click()
            await page.wait_for_timeout(300)
        assert await page.evaluate("() => window.pwned") is None
        assert await page.locator("main img, main script, main iframe").count() == 0


async def test_runs_and_a_group_of_four_fit_side_by_side_at_1280(made: Path) -> None:
    async with opened(made) as page:
        for at, region in (("#/", "runs"), ("#/group/math%2Fgrpo/math%2Fgrpo%2F9", "episodes side by side")):
            await visit(page, at)
            shown = page.get_by_role("region", name=region)
            await expect(shown).to_be_visible()
            hidden = await shown.evaluate("one => one.scrollWidth - one.clientWidth")
            assert hidden <= 0, f"{at}: {hidden} px of {region} are cut off"


async def test_the_page_follows_the_book(tmp_path: Path) -> None:
    with open_book(tmp_path / "book", writer="agent") as book:
        async with opened(tmp_path / "book") as page:
            await expect(page.get_by_text("Nothing has been recorded")).to_be_visible()
            book.log.append_blocking(Event(run_id="new-run", fact=EpisodeOpened(task_id="t"), episode_id="e"))
            await expect(page.get_by_role("link", name="new-run")).to_be_visible(timeout=20_000)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
async def test_every_page_fits_and_is_accessible(made: Path, width: int, scheme: str) -> None:
    source = AXE.read_text()
    async with opened(made, width=width, color_scheme=scheme) as page:
        for name, address in PAGES.items():
            await visit(page, address)
            wide = await page.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} px wide at {width}"
            await page.evaluate(source)
            found = await page.evaluate("async () => (await axe.run()).violations")
            serious = [
                (one["id"], one["nodes"][0]["html"], one["nodes"][0]["failureSummary"])
                for one in found
                if one["impact"] in ("serious", "critical")
            ]
            assert serious == [], name
