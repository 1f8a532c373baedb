"""`pip install rollbook`, without any extra: it reads books, and what needs more says which extra that is.

Run by `make test-base` in an environment that has the built package and pytest, nothing else of ours.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.store import connect

GOLDEN = Path(__file__).parents[1] / "golden" / "book-v1"
ROLLBOOK = str(Path(sys.executable).parent / "rollbook")


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "book")
    (tmp_path / "judge.py").write_text("def score(episode):\n    return float(len(episode.interactions))\n")
    (tmp_path / "tasks.jsonl").write_text('{"messages": [{"role": "user", "content": "2 + 2?"}]}\n')
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "chat_template.jinja"):
        (model / name).write_text("{}")
    return tmp_path


def rollbook_(folder, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROLLBOOK, *line.split()], cwd=folder, env={"HOME": str(folder), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip


def test_this_is_the_base_and_the_package_as_it_is_installed():
    ran = subprocess.run(
        [sys.executable, "-c", "import rollbook.store; print(rollbook.store.__file__)"],
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert "site-packages" in ran.stdout
    for name in ("litestar", "jinja2", "tokenizers", "torch", "transformers", "pandas", "openai", "aiohttp"):
        assert importlib.util.find_spec(name) is None


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "sql book task_curve",
        "sql book --format json task_curve",
        "show book last",
        "runs book",
        "groups book",
        "episodes book --json",
        "stats book",
        "tail book --no-follow",
        "verify book",
        "reward book judge.py:score --name v2",
        "reward book n_output::double --sql --name short",
        "rewards book reward reward",
        "export book --format chat --out chat.jsonl",
        "export book --format trl --out trl",
        "export book --format parquet --out parquet",
        "import other book",
        "prune book --where true --dry-run",
    ],
)
def test_what_reads_a_book_needs_no_extra(folder, line):
    ran = rollbook_(folder, line)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout + ran.stderr


def test_what_was_exported_comes_back(folder):
    assert rollbook_(folder, "export book --format parquet --out tables").returncode == 0
    ran = rollbook_(folder, "import other tables")
    assert ran.returncode == 0, ran.stderr
    with connect(folder / "other") as book:
        assert book.sql("from episodes").fetchall()


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("serve other --model model", "serve"),
        ("serve other --engine scripted --model model", "serve"),
        ("view book --port 0", "serve"),
        ("show book last --tokenizer model", "serve"),
        ("import other tasks.jsonl --format chat --run old --tokenizer model", "serve"),
        ("replay book last judge.score --tokenizer model", "serve"),
        ("eval judge.score tasks.jsonl --model model", "serve"),
        ("demo", "serve"),
        ("rescore book --model model --name reference", "train"),
        ("train config.yaml", "train"),
        ("run-areal train.py", "train"),
        ("lake lake --catalogue host=nowhere --data data", "lake"),
    ],
)
def test_what_needs_an_extra_says_which(folder, line, extra):
    ran = rollbook_(folder, line)
    assert ran.returncode == 1
    assert f"pip install 'rollbook[{extra}]'" in ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout


@pytest.mark.parametrize("layout", ["verl", "areal"])
def test_an_export_of_tensors_names_the_package(folder, layout):
    ran = rollbook_(folder, f"export book --format {layout} --out there")
    assert (ran.returncode, "pip install torch" in ran.stderr, "Traceback" in ran.stderr) == (1, True, False)
