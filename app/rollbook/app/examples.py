"""Where the examples are: beside the code in a checkout, inside the package in a wheel."""

import sys
from pathlib import Path


def examples_folder() -> Path:
    """The folder of the examples. Raises FileNotFoundError where neither place has it."""
    here = Path(__file__).resolve()
    for folder in (here.parents[3] / "examples", here.parent / "_examples"):
        if (folder / "arithmetic.py").is_file():
            return folder
    raise FileNotFoundError(
        f"the examples are neither in {here.parents[3]} nor in {here.parent}; install Rollbook again"
    )


def make_importable(folder: Path) -> None:
    """Let import strings such as `arithmetic.ArithmeticAgent` find files of a folder."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
