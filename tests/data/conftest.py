"""One book with everything in it, for tests that only read; copied where a test writes."""

import shutil
from pathlib import Path

import pytest

from web_book import make_book


@pytest.fixture(scope="session")
def shown_book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "book"
    make_book(path, versions=3, groups=2, samples=3)
    return path


@pytest.fixture
def own_book(shown_book: Path, tmp_path: Path) -> Path:
    shutil.copytree(shown_book, tmp_path / "book")
    return tmp_path / "book"
