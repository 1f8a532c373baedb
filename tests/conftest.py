"""What every test may rely on."""

import contextlib
import faulthandler
import os

import pytest

with contextlib.suppress(ImportError):  # not in the environment of `make test-base`
    from hypothesis import HealthCheck, settings

    # A machine that is slow or busy is no failure; and the gate draws the same examples each time.
    settings.register_profile(
        "rollbook", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("rollbook")

EXIT_S = 300  # on a busy machine, what closes at the end of Python takes its time


def pytest_unconfigure() -> None:
    """A thread that a failed test left behind keeps no process alive: what all do is printed, and it ends with 1."""
    faulthandler.dump_traceback_later(EXIT_S, exit=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
