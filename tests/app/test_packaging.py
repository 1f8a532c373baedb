"""What a user's environment must look like after installing us, and from inside this repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("store", "proxy", "learner", "agents", "app")
SDK = (
    "from agents import Agent; import inspect; assert 'site-packages' in inspect.getfile(Agent), inspect.getfile(Agent)"
)


def test_no_room_shadows_a_package_of_its_name() -> None:
    for room in ROOMS:
        assert not (ROOT / room / "__init__.py").exists()
        assert not (ROOT / room / "rollbook" / "__init__.py").exists()


@pytest.mark.parametrize("way", ["-c", "script", "-m", "pytest"])
def test_agents_is_the_openai_sdk_from_the_repository_root(way: str, tmp_path: Path) -> None:
    if way == "-c":
        command = ["-c", SDK]
    elif way == "script":
        (tmp_path / "script.py").write_text(SDK)
        command = [str(tmp_path / "script.py")]
    elif way == "-m":
        (tmp_path / "sdk_module.py").write_text(SDK)
        command = ["-c", f"import sys, runpy; sys.path.append({str(tmp_path)!r}); runpy.run_module('sdk_module')"]
    else:
        (tmp_path / "test_sdk.py").write_text(f"def test_sdk():\n    {SDK}\n")
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_sdk.py")]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_at_top_level_but_rollbook(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("rollbook-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rollbook"}
    for room in ROOMS:
        for path in (ROOT / room / "rollbook").rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(ROOT / room)) in names
        assert f"rollbook/{room}/py.typed" in names
    assert any(name.startswith("rollbook/store/migrations/") for name in names)
    assert "rollbook/app/_examples/arithmetic.py" in names

    # Unpacked beside the dependencies, away from this repository, it runs.
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import rollbook.store, rollbook.app.cli as cli, sys; assert 'site' in rollbook.store.__file__\n"
        "from rollbook.store import open_book; open_book('book', writer='w').close()\n"
        "from rollbook.app.examples import examples_folder; assert 'site' in str(examples_folder())\n"
        "cli.main(['sql', 'book', 'select count(*) as n from episodes', '--format', 'csv'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout.split()) == (0, ["n", "0"]), ran.stderr
