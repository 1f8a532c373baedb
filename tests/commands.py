"""The `rollbook` command, run inside the test's own process."""

import pytest

from rollbook.app.cli import main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit status, and all that was printed, errors last."""
    status = 0
    try:
        main(words)
    except SystemExit as stop:
        status = int(stop.code or 0)
    said = capsys.readouterr()
    return status, said.out + said.err
