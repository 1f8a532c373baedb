"""Whatever clients do over whichever API, the book has the prompts that the engine got, and each logprob its token."""

import anyio
import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy_serving import said, serving
from rollbook.proxy.scripted import scripted_logprob

WORDS = ["yes", "no", " maybe\n", "é", "<tool", '{"a": 1}', "I will.  "]

# A step: which session, which earlier answer to go on from (None: begin), what to say, how to disturb the history.
steps = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.none() | st.integers(0, 5),
        st.sampled_from(WORDS),
        st.sampled_from(["as it was", "as it was", "stripped", "edited", "dropped"]),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def running():
    """A server in a thread, and the prompts that its engine got, by interaction."""
    prompts, lines = {}, iter(range(1 << 30))

    def script(generation):
        prompts[generation.request_id] = generation.prompt_ids.tolist()
        return said(f"{WORDS[next(lines) % len(WORDS)]}{len(prompts)}")

    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(script, chunk_tokens=3)) as served,
        httpx.Client(base_url=served.url, trust_env=False, timeout=60) as http,
    ):
        yield portal, served, http, prompts


def ask(http, dialect, key, history):
    """One request in a dialect; (id, text) of its answer."""
    if dialect == "chat":
        reply = http.post("/chat/completions", json={"messages": history}, headers={"x-api-key": key}).json()
        return reply["id"], reply["choices"][0]["message"]["content"]
    if dialect == "responses":
        reply = http.post("/responses", json={"input": history}, headers={"x-api-key": key}).json()
        return reply["id"], reply["output"][0]["content"][0]["text"]
    body = {"messages": history, "max_tokens": 400}
    reply = http.post("/messages", json=body, headers={"x-api-key": key}).json()
    return reply["id"], "".join(block["text"] for block in reply["content"])


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_the_book_has_what_the_engine_got(running, dialect):
    portal, served, http, prompts = running

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps)
    def check(plan):
        sessions = [portal.call(served.client.start_session, "t") for _ in range(2)]
        talks = [[], []]  # per session: histories that end in an answer
        for which, onto, text, disturbance, times in plan:
            known = talks[which]
            history = [dict(m) for m in known[onto % len(known)]] if known and onto is not None else []
            if history and disturbance == "stripped":
                history[-1]["content"] = history[-1]["content"].strip()
            elif history and disturbance == "edited":
                history[-1]["content"] += " indeed"
            elif len(history) > 2 and disturbance == "dropped":
                history = history[2:]
            history.append({"role": "user", "content": text})
            for _ in range(times):  # the same bytes on purpose: as many samples
                _, answer = ask(http, dialect, sessions[which].api_key, history)
                known.append([*history, {"role": "assistant", "content": answer}])
        ids = {session.session_id for session in sessions}
        paths = {}
        events = [e for e in served.events("InteractionRecorded") if e.episode_id in ids]
        assert len(events) == sum(times for *_, times in plan)
        for event in events:
            fact = event.fact
            above = paths.get(fact.parent_id, np.empty(0, np.int32))
            assert fact.shared <= len(above)
            if fact.edge == "extends":
                assert fact.shared == len(above)
            prompt = np.concatenate((above[: fact.shared], event.prompt_ids))
            assert prompt.tolist() == prompts[event.interaction_id]
            assert fact.is_trainable
            for i, (token, logprob) in enumerate(zip(event.output_ids, event.logprobs, strict=True)):
                assert logprob == np.float32(scripted_logprob(int(token), i))
            paths[event.interaction_id] = np.concatenate((prompt, event.output_ids))
        for session in sessions:
            portal.call(served.client.end_session, session.api_key)

    check()
