"""A headless Chromium of this machine; nothing is downloaded."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser with a fresh profile. Raises FileNotFoundError where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise FileNotFoundError("expected chromium on the PATH; install it, e.g. `apt-get install chromium`")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found, args=_FLAGS, headless=True)
        try:
            yield browser
        finally:
            await browser.close()
