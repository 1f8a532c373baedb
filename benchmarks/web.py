"""How soon the web page of a big book is there, in a headless Chromium: python benchmarks/web.py [--episodes 100000]

First paint, the first list, then each screen by its address: milliseconds until its data stand on it, and the longest
time for which the browser answered nothing. The book is made first (about a minute for 100,000 episodes) and its tables
are computed; `--book` keeps it for another time.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import anyio
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rollbook.app.web import viewing
from rollbook.store import Event, open_book
from rollbook.store.events import (
    BatchRow,
    BatchTaken,
    BatchTrained,
    EpisodeClosed,
    EpisodeOpened,
    InteractionRecorded,
    PolicyPublished,
    RewardGiven,
    RunStarted,
)
from web_browser import chromium

PER_VERSION = 512
RUN = "math/big"
LONGEST = """() => { window.longest = 0; new PerformanceObserver(list => { for (const e of list.getEntries())
    window.longest = Math.max(window.longest, e.duration) }).observe({ type: "longtask", buffered: true }) }"""
SETTLED = "at => location.hash === at && !/Reading the book|Asking/.test(document.body.innerText)"


def make(path: Path, n: int) -> None:
    """A run of n episodes of one call, in groups of 8, `PER_VERSION` for each version and step."""
    rng = np.random.default_rng(0)
    said = b'{"request":[{"role":"user","content":"3 * 4?"}],"reply":{"role":"assistant","content":"It is 12."}}'
    prompt, output = np.arange(40, dtype=np.int32), np.arange(40, 60, dtype=np.int32)
    logprobs = np.full(20, -0.3, np.float32)
    with open_book(path, writer="made") as book:
        book.log.append_blocking(
            Event(run_id=RUN, fact=RunStarted(name=RUN)),
            Event(run_id=RUN, fact=PolicyPublished(version=0, path="nowhere")),
        )
        for version in range(-(-n // PER_VERSION)):
            events, rows = [], []
            for e in range(version * PER_VERSION, min(n, (version + 1) * PER_VERSION)):
                episode, call = f"ep_{e:032x}", f"chatcmpl-{e:032x}"
                reward = float(rng.random() < 0.1 + 0.8 * e / n)
                opened = EpisodeOpened(task_id=f"t{e // 8 % 500}", group_id=f"{RUN}/{e // 8}", version=version)
                fact = InteractionRecorded(prompt_length=40, finish_reason="stop", seconds=0.5)
                events += [
                    Event(run_id=RUN, episode_id=episode, fact=opened),
                    Event(
                        run_id=RUN,
                        episode_id=episode,
                        interaction_id=call,
                        fact=fact,
                        messages=said,
                        prompt_ids=prompt,
                        output_ids=output,
                        logprobs=logprobs,
                        versions=np.full(20, version, np.int32),
                    ),
                    Event(run_id=RUN, episode_id=episode, fact=RewardGiven(value=reward)),
                    Event(run_id=RUN, episode_id=episode, fact=EpisodeClosed(state="done")),
                ]
                rows.append(BatchRow(interaction_id=call, credit=reward, advantage=reward - 0.5))
            batch = BatchTaken(batch_id=f"b{version}", step=version, version=version, rows=rows)
            events += [
                Event(run_id=RUN, fact=batch),
                Event(run_id=RUN, fact=BatchTrained(batch_id=f"b{version}", step=version, metrics={"reward": 0.5})),
                Event(run_id=RUN, fact=PolicyPublished(version=version + 1, path="nowhere", step=version + 1)),
            ]
            book.log.append_blocking(*events)
        book.catch_up()


async def measure(path: Path, n: int) -> None:
    last = f"ep_{n - 1:032x}"
    screens = {
        "run: curves": "#/run/math%2Fbig",
        "run: episodes": "#/run/math%2Fbig/episodes",
        "run: episodes by reward": "#/run/math%2Fbig/episodes?sort=-reward",
        "run: episodes where": "#/run/math%2Fbig/episodes?where=reward%20%3E%200%20and%20n_output%20%3E%2010",
        "run: the last page": f"#/run/math%2Fbig/episodes?offset={n - 100}",
        "run: groups": "#/run/math%2Fbig/groups",
        "run: discards and failures": "#/run/math%2Fbig/losses",
        "run: engine and trainer": "#/run/math%2Fbig/gap",
        "group side by side": "#/group/math%2Fbig/math%2Fbig%2F9",
        "episode": f"#/episode/{last}",
        "SQL: task_curve": "#/sql?question=task_curve&run=math%2Fbig",
    }
    async with viewing(path) as url, chromium() as browser:
        page = await (await browser.new_context(viewport={"width": 1280, "height": 860})).new_page()
        for attempt in ("cold", "warm"):
            began = time.perf_counter()
            await page.goto(url)
            await page.get_by_role("link", name=RUN).first.wait_for()
            listed = (time.perf_counter() - began) * 1e3
            paint = await page.evaluate(
                "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN"
            )
            print(f"first paint ({attempt}) {paint:8.0f} ms, with the list of runs {listed:8.0f} ms", flush=True)
            await page.goto("about:blank")
        await page.goto(url)
        await page.get_by_role("link", name=RUN).first.wait_for()
        for name, address in screens.items():
            await page.evaluate(LONGEST)
            began = time.perf_counter()
            await page.evaluate("to => { location.hash = to }", address)
            await page.wait_for_function(SETTLED, arg=address, polling="raf")
            took = (time.perf_counter() - began) * 1e3
            await page.wait_for_timeout(150)
            longest = await page.evaluate("() => window.longest")
            print(f"{name:<28} {took:8.0f} ms, longest block {longest:5.0f} ms", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--episodes", type=int, default=100_000)
    options.add_argument("--book", type=Path, default=None)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.book or Path(folder) / "book"
        if not path.exists():
            began = time.process_time()
            make(path, args.episodes)
            print(f"made {args.episodes:,} episodes in {time.process_time() - began:.0f} s of CPU", flush=True)
        anyio.run(measure, path, args.episodes)


if __name__ == "__main__":
    main()
