"""The documents: every block runs, both languages say the same, the pages build without a warning."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs_blocks import RUNS, SHOWN, blocks
from rollbook.app.cli import _parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "decisions" not in page.parts and page.name != "LOG.md"),
]
"""What runs. README.zh-CN.md and the Chinese quick start have the blocks of the English ones, by tests."""


@pytest.mark.slow
def test_every_block_of_the_documents_runs(tmp_path: Path) -> None:
    first = DOCS / "quickstart.md"  # makes the files that others name
    pages = [first, *(page for page in PAGES if ".zh-CN" not in page.name and page != first)]
    (tmp_path / "wrong.md").write_text("```bash\nrollbook show BOOK nothing\n```\n\n```python\n1 / 0\n```\n")
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, ROOT / "tests/docs_blocks.py", tmp_path / "here", *pages, tmp_path / "wrong.md"],
        env={
            **os.environ,
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),  # as where it is installed
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout.splitlines()[-1])
    wrong = failed.pop("wrong.md")  # that the runner would notice
    assert "no episode" in wrong[0]
    assert "ZeroDivisionError" in wrong[1]
    assert not failed, "\n\n".join(f"{page}: {problem}" for page, problems in failed.items() for problem in problems)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.zh-CN.md"], ids=lambda page: page.name)
def test_every_block_says_what_it_is_and_what_does_not_run_says_why(page: Path) -> None:
    lines = page.read_text().splitlines()
    for line, language, _ in blocks(page):
        assert language in RUNS | SHOWN, f"line {line}: a block of {language or 'no language'}"
        if language == "console":
            assert lines[line - 2].startswith("<!-- not run here: "), f"line {line}: say above it why it is not run"


def test_every_rollbook_command_that_is_shown_and_not_run_is_one() -> None:
    shown = [
        (page.name, shlex.split(line, comments=True))
        for page in PAGES
        for _, language, code in blocks(page)
        if language == "console"
        for line in code.replace("\\\n", " ").splitlines()
        if line.startswith("rollbook ")
    ]
    assert len(shown) > 5
    for page, words in shown:
        try:
            _parser().parse_args(words[1 : words.index("|") if "|" in words else None])
        except SystemExit:
            pytest.fail(f"{page} shows `{shlex.join(words)}`, which the command line refuses")


def test_the_chinese_quick_start_has_the_blocks_of_the_english_one() -> None:
    english, chinese = DOCS / "quickstart.md", DOCS / "quickstart.zh-CN.md"
    assert [block[1:] for block in blocks(english)] == [block[1:] for block in blocks(chinese)]
    assert english.read_text().count("\n## ") == chinese.read_text().count("\n## ")


def test_the_settings_page_is_what_the_types_give() -> None:
    page = runpy.run_path(str(DOCS / "make_config.py"))["page"]()
    assert (DOCS / "config.md").read_text() == page, "run: python docs/make_config.py"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"([\w./-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if "decisions" not in page.parts}
    assert named == there


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site/quickstart/index.html").is_file()
