"""`rollbook fork`: n new samples from an interaction of a recorded episode, by today's policy.

With an agent, its own code runs again: what the recorded episode had answered before the interaction is answered from
the book, and from there on the policy answers. Without one, the interaction's own request is asked again and its answer
is the sample. Each sample is a new episode of the same task, linked to its origin, and all of one call are a group.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rollbook.agents.data import Task
from rollbook.agents.runner import Episode, Runner
from rollbook.proxy.client import ProxyClient
from rollbook.store import Book, StoreError, open_book
from rollbook.store.episodes import Interaction

from .evaluation import on_server

_WISHES = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "response_format",
)  # fmt: skip
"""What is asked again of how the origin was drawn; not its seed, since the samples are to differ."""


class NotForked(StoreError):
    """The book does not have what a fork needs."""


class Again:
    """Asks the requests that led to an interaction once more, and then its own; what that one answers is the sample."""

    def __init__(self, way: Sequence[Interaction]) -> None:
        self._asked = [_Asked(one) for one in way]

    async def run(self, data: Mapping[str, Any], *, base_url: str, api_key: str, **_: Any) -> None:
        new_ids: dict[str, str] = {}  # of tool calls: each answer brings its own
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            for asked in self._asked:
                headers = {"authorization": f"Bearer {api_key}", **asked.headers}
                body = asked.body
                if "messages" in body:
                    body = body | {"messages": [_renamed(message, new_ids) for message in body["messages"]]}
                url = f"{base_url}/{asked.path}"
                answer = await client.post(url, content=msgspec.json.encode(body), headers=headers)
                if answer.is_error:
                    raise RuntimeError(f"{asked.interaction_id} could not be asked again: {answer.text}")
                if asked.call_ids:
                    calls = answer.json()["choices"][0]["message"].get("tool_calls") or ()
                    new_ids |= zip(asked.call_ids, (call["id"] for call in calls), strict=False)


class _Asked:
    """An interaction's request. Its prompt is to be the same token for token; the server's fork checks that."""

    def __init__(self, one: Interaction) -> None:
        sampling: dict[str, Any] = msgspec.json.decode(one.row["sampling"] or "{}")
        self.interaction_id = one.interaction_id
        self.headers = {"x-rollbook-role": one.row["role"]} if one.row["role"] else {}
        self.call_ids = [call["id"] for call in one.reply.get("tool_calls") or ()]
        self.path = "chat/completions"
        self.body: dict[str, Any] = {"model": one.row["model"], **{k: sampling[k] for k in _WISHES if k in sampling}}
        if one.row["dialect"] == "completions":
            self.path = "completions"
            self.body["prompt"] = one.prompt_ids.tolist()
            return
        self.body["messages"] = one.messages
        if tools := one.tools:
            self.body["tools"] = tools
            if "opening" in sampling and "response_format" not in sampling:
                self.body["tool_choice"] = "required"


def _renamed(message: dict[str, Any], new_ids: Mapping[str, str]) -> dict[str, Any]:
    message = dict(message)
    if (answered := message.get("tool_call_id")) is not None:
        message["tool_call_id"] = new_ids.get(answered, answered)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [call | {"id": new_ids.get(call.get("id"), call.get("id"))} for call in calls]
    return message


def way_to(book: Book, interaction_id: str) -> list[Interaction]:
    """The interactions on the way from the root to this one, and this one. Raises NotForked."""
    try:
        forked = book.interaction(interaction_id)
    except KeyError:
        raise NotForked(
            f'the book has no interaction {interaction_id!r}; `rollbook sql BOOK "select interaction_id from '
            'interactions"` lists them'
        ) from None
    by_id = {one.interaction_id: one for one in book.episode(forked.row["episode_id"]).interactions}
    way: list[Interaction] = []
    at: str | None = interaction_id
    while at is not None and at in by_id:
        way.append(by_id[at])
        at = by_id[at].row["up_id"]
    return way[::-1]


def task_of(book: Book, interaction_id: str) -> Task:
    """The task of an interaction's episode; its row is empty where the book kept none."""
    [row] = book.sql(
        "select e.task_id, e.task from interactions join episodes e using (episode_id) where interaction_id = ?",
        [interaction_id],
    ).to_pylist()
    return Task(
        task_id=row["task_id"] or interaction_id, index=0, row=msgspec.json.decode(row["task"]) if row["task"] else {}
    )


def todays_policy(book: Book, interaction_id: str) -> list[str]:
    """What `serve` needs to answer with the newest policy of the interaction's run; a fork's run is that of its origin.

    Raises NotForked.
    """
    at: str | None = interaction_id
    while at is not None:
        found = book.sql(
            "select p.path, p.version from interactions i join policies p using (run_id) where interaction_id = ? "
            "order by p.version desc",
            [at],
        ).to_pylist()
        for one in found:
            if Path(one["path"]).is_dir():
                return ["--model", one["path"], "--weights-version", str(one["version"])]
        above = book.sql(
            "select origin_interaction_id as id from interactions join episodes using (episode_id) "
            "where interaction_id = ?",
            [at],
        )
        at = above["id"][0].as_py() if above.num_rows else None
    raise NotForked(
        f"no policy of the run of {interaction_id} is on this machine; say with --model which model answers"
    )


async def fork_on(
    client: ProxyClient,
    interaction_id: str,
    workflow: Any,
    task: Task,
    *,
    run_id: str,
    group_id: str,
    n: int = 8,
    workflow_kwargs: Mapping[str, Any] | None = None,
    max_concurrent: int = 64,
    time_limit_s: float = 600.0,
) -> list[Episode]:
    """The samples, on a server that runs already and has the book."""
    runner = Runner(
        client,
        workflow,
        run_id=run_id,
        workflow_kwargs=workflow_kwargs,
        n_samples=n,
        max_concurrent=max_concurrent,
        time_limit_s=time_limit_s,
        origin=interaction_id,
    )
    try:
        return await runner.run_group(task, group_id=group_id)
    finally:
        runner.workflow.close()


def fork(
    book_path: Path,
    interaction_id: str,
    workflow: Any = None,
    *,
    serve_args: Sequence[str] | None = None,
    run_id: str = "fork",
    n: int = 8,
    workflow_kwargs: Mapping[str, Any] | None = None,
    time_limit_s: float = 600.0,
) -> tuple[str, list[Episode]]:
    """The samples, on a server that is started for them; their group and the episodes.

    workflow: the agent, as for training; None: the interaction's request alone. serve_args: what `serve` needs to
    answer; None: the newest policy of the interaction's run. Raises NotForked.
    """
    if n < 1:
        raise NotForked(f"a fork takes at least 1 sample, got {n}")
    with open_book(book_path) as book:
        way = way_to(book, interaction_id)
        if (row := way[-1].row)["is_pruned"] or row["is_broken"]:
            why = "was pruned" if row["is_pruned"] else "is lost in part"
            raise NotForked(f"the prompt of {interaction_id} {why}, so nothing can go on from it; choose another")
        agent = Again(way) if workflow is None else workflow
        task = task_of(book, interaction_id)
        serve_args = todays_policy(book, interaction_id) if serve_args is None else serve_args
        done = book.sql(
            "select count(distinct group_id) as n from episodes where run_id = ? and origin_interaction_id = ?",
            [run_id, interaction_id],
        )
        group_id = f"{run_id}/{interaction_id}/{done['n'][0].as_py()}"
    work = partial(
        fork_on,
        interaction_id=interaction_id,
        workflow=agent,
        task=task,
        run_id=run_id,
        group_id=group_id,
        n=n,
        workflow_kwargs=workflow_kwargs,
        time_limit_s=time_limit_s,
    )
    return group_id, on_server(book_path, run_id, serve_args, work, log_name="fork")
