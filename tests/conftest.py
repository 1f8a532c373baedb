"""What every test may rely on."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
