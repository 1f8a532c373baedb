"""Answers that end close together share a commit; one that is alone waits for nobody; a bad one harms nobody."""

import asyncio

import pytest

from proxy.talk import Talk, said, user
from rollbook.proxy.gather import Gather
from rollbook.store import BadEvent, Event, MemoryLog, RunStarted


def event(name: str = "n", run_id: str = "r") -> Event:
    return Event(run_id=run_id, fact=RunStarted(name=name))


class Counting(MemoryLog):
    n_appends = 0

    async def append(self, *events: Event) -> list[int]:
        self.n_appends += 1
        await asyncio.sleep(0)
        return await super().append(*events)


@pytest.mark.anyio
async def test_calls_that_are_all_there_share_a_commit_at_once():
    gather = Gather(log := Counting(writer="w"))
    for _ in range(4):
        gather.begin()
    found = await asyncio.gather(*(gather.append(event(), event()) for _ in range(4)))
    assert (log.n_appends, found) == (1, [[0, 1], [2, 3], [4, 5], [6, 7]])


@pytest.mark.anyio
async def test_one_does_not_wait_for_a_call_that_takes_long_and_none_where_it_is_alone(monkeypatch):
    gather = Gather(log := Counting(writer="w"))
    gather.begin()
    gather.begin()
    assert await asyncio.wait_for(gather.append(event()), 60) == [0]
    gather.end()
    monkeypatch.setattr("rollbook.proxy.gather.WAIT_S", 1000.0)
    assert await asyncio.wait_for(gather.append(event()), 60) == [1]
    assert log.n_appends == 2


@pytest.mark.anyio
async def test_a_bad_event_is_refused_alone():
    gather = Gather(Counting(writer="w"))
    for _ in range(3):
        gather.begin()
    found = await asyncio.gather(
        gather.append(event()), gather.append(event(run_id="")), gather.append(event()), return_exceptions=True
    )
    assert found[::2] == [[0], [1]]
    assert isinstance(found[1], BadEvent)


@pytest.mark.anyio
async def test_who_is_cancelled_takes_nothing_back_and_the_others_get_their_positions():
    gather = Gather(log := Counting(writer="w"))
    for _ in range(2):
        gather.begin()
    first = asyncio.ensure_future(gather.append(event("a")))
    await asyncio.sleep(0)
    first.cancel()
    assert await gather.append(event("b")) == [1]
    assert sum(batch.num_rows for batch in log.read()) == 2


@pytest.mark.anyio
async def test_a_call_that_is_over_is_waited_for_by_nobody(monkeypatch):
    monkeypatch.setattr("rollbook.proxy.gather.WAIT_S", 1000.0)
    async with Talk("one", "two") as talk:
        first = await asyncio.wait_for(talk.ask([user("a")]), 60)
        await asyncio.wait_for(talk.ask([user("a"), said(first), user("b")]), 60)
