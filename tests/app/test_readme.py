"""The two READMEs say the same, and only what exists."""

import re
import shlex
from pathlib import Path

import pytest

from rollbook.app.cli import _parser

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]


def blocks(path: Path) -> list[list[str]]:
    """Code blocks without their comments and blank lines."""
    found = re.findall(r"```\w+\n(.*?)```", path.read_text(), re.DOTALL)
    return [[code for line in block.splitlines() if (code := line.split("#")[0].rstrip())] for block in found]


def test_both_languages_have_the_same_code_and_links() -> None:
    english, chinese = READMES
    assert blocks(english) == blocks(chinese)
    links = [set(re.findall(r"\]\(([^)]+)\)", path.read_text())) - {path.name for path in READMES} for path in READMES]
    assert links[0] == links[1]
    assert [line for line in english.read_text().splitlines() if line.startswith("| `")] != []


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_every_link_is_a_file(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_every_rollbook_command_is_one(path: Path) -> None:
    commands = [line for block in blocks(path) for line in block if "rollbook " in line and "import" not in line]
    assert len(commands) > 8
    for line in commands:
        words = shlex.split(line)
        _parser().parse_args(words[1:])


def test_the_folders_named_are_those_that_exist() -> None:
    named = set(re.findall(r"^\| `(\w+)/`", READMES[0].read_text(), re.MULTILINE))
    there = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert named <= there
    assert there - named <= {"tests", "runs", "dist"}
