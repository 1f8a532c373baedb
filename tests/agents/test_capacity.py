"""The capacity formula, with AReaL's own figures."""

import pytest

from rollbook.agents.capacity import capacity


@pytest.mark.parametrize(
    ("concurrency", "batch", "eta", "version", "accepted", "expected"),
    [
        (10, 4, 2, 0, 0, 10),
        (100, 4, 2, 0, 0, 12),
        (1000, 4, 2, 5, 0, 32),
        (20, 4, 2, 0, 5, 7),
        (100, 8, 3, 0, 30, 2),
        (1000, 8, 0, 0, 0, 8),
        (1000, 8, 0, 5, 0, 48),
        (0, 0, 0, 0, 0, 1),
    ],
)
def test_capacity_is_bounded_by_concurrency_and_by_staleness(concurrency, batch, eta, version, accepted, expected):
    assert (
        capacity(
            concurrency=concurrency,
            consumer_batch_size=batch,
            max_head_offpolicyness=eta,
            version=version,
            accepted=accepted,
            running=0,
        )
        == expected
    )


def test_running_groups_take_capacity_and_rejected_ones_give_it_back():
    def left(*, accepted: int, running: int) -> int:
        return capacity(
            concurrency=100,
            consumer_batch_size=4,
            max_head_offpolicyness=0,
            version=0,
            accepted=accepted,
            running=running,
        )

    assert left(accepted=0, running=4) == 0
    assert left(accepted=1, running=3) == 0  # accepted: still counts
    assert left(accepted=0, running=3) == 1  # rejected: counts no more
