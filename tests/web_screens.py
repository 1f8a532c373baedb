"""Takes the pictures in docs/screens: every page of the book that `web_book.py` writes, at 1280 and at 400 px.

python tests/web_screens.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import anyio

from rollbook.app.web import viewing
from web_book import TOKENIZER, make_book
from web_browser import chromium

PAGES = {
    "overview": "#/",
    "run": "#/run/math%2Fgrpo",
    "episodes": "#/run/math%2Fgrpo/episodes?version=3&is_eval=false",
    "losses": "#/run/math%2Fgrpo/losses",
    "gap": "#/run/math%2Fgrpo/gap",
    "group": "#/group/math%2Fgrpo/math%2Fgrpo%2F9",
    "episode": "#/episode/ep_math-grpo_02_0_3",
    "sql": "#/sql?question=task_curve&run=math%2Fgrpo",
}


READY = """at => location.hash === at && document.querySelector('h1') !== null
    && !/Reading the book|Asking/.test(document.body.innerText)
    && (!at.startsWith('#/episode') || document.querySelector('.tokens') !== null)"""


async def take(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        make_book(Path(made) / "runs/demo")
        async with (
            viewing(Path(made) / "runs/demo", tokenizer=str(TOKENIZER)) as url,
            chromium() as browser,
        ):
            for width, scheme in ((1280, "light"), (400, "light"), (1280, "dark")):
                context = await browser.new_context(
                    viewport={"width": width, "height": 860}, color_scheme=scheme, reduced_motion="reduce"
                )
                page = await context.new_page()
                await page.goto(url)
                await page.wait_for_selector("h1")
                for name, address in PAGES.items():
                    if scheme == "dark" and name not in ("run", "episode"):
                        continue
                    await page.evaluate("to => { location.hash = to }", address)
                    await page.wait_for_function(READY, arg=address)
                    await page.wait_for_timeout(200)
                    await page.evaluate("() => scrollTo(0, 0)")
                    suffix = "-dark" if scheme == "dark" else ""
                    await page.screenshot(path=folder / f"{name}-{width}{suffix}.png")
                await context.close()


if __name__ == "__main__":
    chosen = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/screens")
    chosen.mkdir(parents=True, exist_ok=True)
    anyio.run(take, chosen)
