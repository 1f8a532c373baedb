"""What every test may rely on."""

import faulthandler

import pytest

EXIT_S = 60


def pytest_unconfigure() -> None:
    """A thread that a failed test left behind keeps no process alive: what all do is printed, and it ends with 1."""
    faulthandler.dump_traceback_later(EXIT_S, exit=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
