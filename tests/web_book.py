"""Writes a book that shows everything the page can show, with no model and no proxy: the page's tests and pictures.

    python tests/web_book.py BOOK [EPISODES]

Runs that learn and one that does not, groups, evaluation, forks, retries, tools, reasoning, rewards on episodes, calls
and spans, batches, scores, failures, text that would like to be markup. The same seed gives the same book.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import Event, open_book
from rollbook.store.events import (
    BatchRow,
    BatchTaken,
    BatchTrained,
    EpisodeClosed,
    EpisodeOpened,
    Fact,
    InteractionFailed,
    InteractionRecorded,
    Messages,
    PolicyPublished,
    RewardGiven,
    RunStarted,
    TokensScored,
    encode_messages,
)

HOSTILE = "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>\u202e\"'`${1}`&amp;"
TOKENIZER = Path(__file__).parents[1] / "proxy/rollbook/proxy/tokenizers/bytes"
_spelling = Tokenizer.load(TOKENIZER)
_BEGAN = 1_790_000_000_000_000  # us since the epoch
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "calculator", "description": "Evaluates an expression.", "parameters": {}},
    }
]


class Writer:
    """Makes events of one run, each a moment after the one before."""

    def __init__(self, run: str, seed: int) -> None:
        self.run = run
        self.random = random.Random(f"{run}/{seed}")
        self.at = _BEGAN + seed * 3_600_000_000
        self.n = 0

    def event(self, fact: Fact, episode: str | None = None, interaction: str | None = None, **columns: object) -> Event:
        self.at += self.random.randrange(1_000, 400_000)
        self.n += 1
        name = self.random.getrandbits(128).to_bytes(16, "big")
        return Event(
            run_id=self.run,
            fact=fact,
            event_id=name,
            recorded_at=self.at,
            episode_id=episode,
            interaction_id=interaction,
            **columns,  # type: ignore[arg-type]
        )

    def call(
        self,
        episode: str,
        name: str,
        request: list[dict[str, object]],
        reply: dict[str, object],
        *,
        version: int,
        parent: tuple[str, int] | None = None,
        edge: str | None = None,
        cause: str | None = None,
        kept: int | None = None,
        **fact: object,
    ) -> tuple[Event, int]:
        """A recorded call and the length of its path; `parent` is a call and the length of the path that it shares."""
        said = str(reply.get("reasoning_content") or "") + str(reply.get("content") or "")
        said += "".join(json.dumps(call) for call in reply.get("tool_calls") or [])  # type: ignore[attr-defined]
        output = _spelling.encode(said)
        prompt = _spelling.encode(json.dumps(request))
        draw = np.random.default_rng(self.random.getrandbits(32))
        shared = parent[1] if parent else 0
        event = self.event(
            InteractionRecorded(
                parent_id=parent[0] if parent else None,
                edge=(edge or "extends") if parent else None,  # type: ignore[arg-type]
                cause=cause,
                shared=shared,
                prompt_length=shared + len(prompt),
                model="demo-135m",
                seconds=round(0.2 + len(output) / 90, 3),
                first_token_seconds=0.11,
                **fact,  # type: ignore[arg-type]
            ),
            episode,
            name,
            messages=encode_messages(
                Messages(request=request, reply=reply, tools=None if parent else _TOOLS, kept=kept)
            ),
            prompt_ids=prompt,
            output_ids=output,
            logprobs=-draw.exponential(0.35, len(output)).astype(np.float32),
            versions=np.full(len(output), version, np.int32),
        )
        return event, shared + len(prompt) + len(output)


def attempt(
    write: Writer, episode: str, *, task: int, group: str, version: int, skill: float, is_eval: bool
) -> Iterator[Event]:
    """One episode: a question, a tool, an answer; some fork, some fail."""
    a, b, c = task % 7 + 2, task % 5 + 3, task % 11 + 4
    dice = write.random
    yield write.event(
        EpisodeOpened(
            task_id=f"task-{task:03}",
            group_id=group,
            version=version,
            is_eval=is_eval,
            task={"question": f"{a}*{b}+{c}"},
        ),
        episode,
    )
    question: list[dict[str, object]] = [
        {"role": "system", "content": "You are a careful assistant. Use the calculator, then answer with the number."},
        {"role": "user", "content": f"What is {a} * {b} + {c}?"},
    ]
    tool_call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "calculator", "arguments": json.dumps({"expression": f"{a}*{b}+{c}"})},
    }
    thought = f"The product {a} * {b} comes first, then {c} is added. The calculator will do it."
    first, n = write.call(
        episode,
        f"{episode}-1",
        question,
        {"role": "assistant", "content": None, "reasoning_content": thought, "tool_calls": [tool_call]},
        version=version,
        finish_reason="tool_calls",
    )
    yield first
    if dice.random() < 0.08:
        yield write.event(
            InteractionFailed(
                error="EngineUnavailable", message="the engine is restarting; try again in 2 s", status=503
            ),
            episode,
        )
        yield write.event(EpisodeClosed(state="failed", reason="TimeoutError: the tool took longer than 30 s"), episode)
        return
    is_right = dice.random() < skill
    value = a * b + c if is_right else a * (b + c)
    result: list[dict[str, object]] = [{"role": "tool", "tool_call_id": "call_1", "content": str(a * b + c)}]
    answer, m = write.call(
        episode,
        f"{episode}-2",
        result,
        {"role": "assistant", "content": f"The answer is {value}."},
        version=version,
        parent=(f"{episode}-1", n),
        finish_reason="stop",
    )
    yield answer
    if dice.random() < 0.3:
        forked, _ = write.call(
            episode,
            f"{episode}-3",
            [{"role": "user", "content": "Check it another way."}],
            {"role": "assistant", "content": f"{b} * {a} = {a * b}, and {a * b} + {c} = {a * b + c}."},
            version=version,
            parent=(f"{episode}-1", n),
            edge="rerendered",
            cause="reasoning left out",
            finish_reason="stop",
            kept=2,
        )
        yield forked
        yield write.event(RewardGiven(value=0.25, name="reward", source="check"), episode, f"{episode}-3")
    if dice.random() < 0.3:
        again, _ = write.call(
            episode,
            f"{episode}-4",
            [{"role": "user", "content": "Thanks! Say it in one word."}],
            {"role": "assistant", "content": str(value)},
            version=version,
            parent=(f"{episode}-2", m),
            finish_reason="length",
        )
        yield again
    yield write.event(
        RewardGiven(value=float(is_right) - 0.2 * (not is_right), source="score@1f3c"), episode, f"{episode}-2"
    )
    yield write.event(EpisodeClosed(state="done"), episode)


def learning(run: str, *, seed: int, versions: int, groups: int, samples: int, gain: float) -> Iterator[Event]:
    """A run of some versions, each with groups of episodes, a batch and scores."""
    write = Writer(run, seed)
    yield write.event(RunStarted(name=run, config={"actor": {"lr": 1e-5}, "seed": seed}))
    yield write.event(PolicyPublished(version=0, path="/models/demo-135m"))
    for version in range(versions):
        taken: list[str] = []
        skill = min(0.95, 0.15 + gain * version)
        for g in range(groups):
            task = version * groups + g
            is_eval = g == groups - 1
            for s in range(samples):
                episode = f"ep_{run.replace('/', '-')}_{version:02}_{g}_{s}"
                events = list(
                    attempt(
                        write, episode, task=task, group=f"{run}/{task}", version=version, skill=skill, is_eval=is_eval
                    )
                )
                yield from events
                if not is_eval and any(
                    isinstance(event.fact, EpisodeClosed) and event.fact.state == "done" for event in events
                ):
                    taken += [event.interaction_id for event in events if isinstance(event.fact, InteractionRecorded)]  # type: ignore[misc]
        batch = f"{run}/batch-{version}"
        rows = [
            BatchRow(interaction_id=name, credit=1.0, advantage=round(write.random.gauss(0, 1), 3)) for name in taken
        ]
        yield write.event(
            BatchTaken(
                batch_id=batch,
                step=version + 1,
                version=version,
                rows=rows,
                discarded={"all rewards equal": version % 3, "no reward": 1},
            )
        )
        yield write.event(BatchTrained(batch_id=batch, step=version + 1, metrics={"loss": 0.5 / (version + 1)}))
        yield write.event(PolicyPublished(version=version + 1, path=f"/models/v{version + 1}", step=version + 1))


def scores(write: Writer, book_events: list[Event]) -> Iterator[Event]:
    """Some answers under the weights of up to two versions later."""
    for event in book_events:
        if isinstance(event.fact, InteractionRecorded) and write.random.random() < 0.5:
            later = write.random.randrange(3)
            assert event.logprobs is not None
            assert event.versions is not None
            noise = np.random.default_rng(later).normal(0.01 * later, 0.004 + 0.02 * later, len(event.logprobs))
            yield write.event(
                TokensScored(version=int(event.versions[0]) + later),
                event.episode_id,
                event.interaction_id,
                logprobs=(event.logprobs + noise).astype(np.float32),
                entropies=np.full(len(event.logprobs), 0.7 - 0.05 * later, np.float32),
            )


def hostile() -> Iterator[Event]:
    """A run whose every name and word would like to be markup."""
    run = f"hostile/{HOSTILE}"
    write = Writer(run, 9)
    episode = "ep_hostile"
    yield write.event(EpisodeOpened(task_id=HOSTILE, group_id=HOSTILE, version=0, task={HOSTILE: HOSTILE}), episode)
    call = {"id": "x", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    root, n = write.call(
        episode,
        "call_hostile",
        [
            {"role": HOSTILE, "content": HOSTILE},
            {"role": "user", "content": [{"type": "text", "text": HOSTILE}, {"type": HOSTILE}]},
        ],
        {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [call]},
        version=0,
        role=HOSTILE,
        finish_reason=HOSTILE,
        dialect=HOSTILE,
    )
    yield root
    yield write.call(
        episode,
        "call_hostile_2",
        [{"role": "tool", "tool_call_id": "x", "content": HOSTILE}],
        {"role": "assistant", "content": "\n\t" + HOSTILE * 100},
        version=0,
        parent=("call_hostile", n),
        cause=HOSTILE,
        edge="rerendered",
    )[0]
    yield write.event(RewardGiven(value=-1.0, name=HOSTILE, source=HOSTILE, start=0, end=3), episode, "call_hostile")
    yield write.event(InteractionFailed(error=HOSTILE, message=HOSTILE, status=500), episode)
    yield write.event(EpisodeClosed(state="failed", reason=HOSTILE), episode)


def make_book(path: Path, *, versions: int = 6, groups: int = 4, samples: int = 4) -> None:
    """Write the book; about 5 events per episode."""
    with open_book(path, writer="maker") as book:
        size = {"versions": versions, "groups": groups, "samples": samples}
        good = list(learning("math/grpo", seed=1, gain=0.13, **size))
        write = Writer("math/grpo", 3)
        for events in (
            good,
            list(scores(write, good)),
            list(learning("math/no-signal", seed=2, gain=0.0, **size)),
            list(hostile()),
        ):
            for start in range(0, len(events), 4096):
                book.log.append_blocking(*events[start : start + 4096])
        book.catch_up()


if __name__ == "__main__":
    n_episodes = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    make_book(
        Path(sys.argv[1]), **({"versions": 50, "groups": max(2, n_episodes // 800), "samples": 8} if n_episodes else {})
    )
