"""Events for tests of the store: random ones for Hypothesis and plain ones for load."""

import numpy as np
from hypothesis import strategies as st

from rollbook.store import (
    BatchRow,
    BatchTaken,
    BatchTrained,
    EpisodeClosed,
    EpisodeOpened,
    Event,
    InteractionRecorded,
    InteractionsPruned,
    Messages,
    RewardGiven,
    RunStarted,
    TokensScored,
    new_id,
)
from rollbook.store.events import encode_messages

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=12).map(lambda ids: np.array(ids, np.int32))
small = st.integers(0, 50)
finite = st.floats(allow_nan=False, allow_infinity=False)
ids = st.sampled_from(["a", "b", "c", "日本", "é" * 3])


@st.composite
def interactions(draw: st.DrawFn) -> Event:
    output, prompt = draw(tokens), draw(tokens)
    n = len(output)
    parent = draw(st.none() | ids)
    shared = draw(small) if parent else 0
    floats = st.lists(st.floats(width=32), min_size=n, max_size=n).map(lambda v: np.array(v, np.float32))
    return Event(
        run_id="run",
        episode_id=draw(ids),
        interaction_id=draw(ids),
        fact=InteractionRecorded(
            parent_id=parent,
            edge="extends" if parent else None,
            shared=shared,
            prompt_length=shared + len(prompt),
            sampling={"temperature": draw(finite)},
        ),
        messages=encode_messages(Messages(request=[{"role": "user", "content": draw(texts)}], reply={"content": None})),
        prompt_ids=prompt,
        output_ids=output,
        logprobs=draw(floats),
        versions=np.full(n, draw(small), np.int32),
        entropies=draw(st.none() | floats),
    )


def _event(**fields: object) -> Event:
    return Event(run_id="run", **fields)  # type: ignore[arg-type]


def events() -> st.SearchStrategy[Event]:
    return st.one_of(
        interactions(),
        st.builds(_event, fact=st.builds(RunStarted, name=texts, config=st.dictionaries(texts, texts, max_size=2))),
        st.builds(
            _event,
            episode_id=ids,
            fact=st.builds(EpisodeOpened, task_id=texts, group_id=st.none() | texts, attempt=small),
        ),
        st.builds(_event, episode_id=ids, fact=st.builds(EpisodeClosed, state=st.just("done"), reason=texts)),
        st.builds(_event, episode_id=ids, fact=st.builds(RewardGiven, value=finite, name=texts.filter(bool))),
        st.builds(
            _event,
            fact=st.builds(
                BatchTaken,
                batch_id=ids,
                step=small,
                version=small,
                rows=st.lists(st.builds(BatchRow, interaction_id=ids, credit=finite, advantage=finite), max_size=3),
            ),
        ),
        st.builds(_event, fact=st.builds(BatchTrained, batch_id=ids, step=small)),
        st.builds(
            _event,
            episode_id=ids,
            fact=st.builds(InteractionsPruned, interaction_ids=st.lists(ids, min_size=1, max_size=3)),
        ),
        st.builds(
            lambda n: _event(
                interaction_id="a", fact=TokensScored(version=1), logprobs=np.zeros(n, np.float32), entropies=None
            ),
            small,
        ),
    )


def interaction(n_prompt: int = 50, n_output: int = 50, text: str = "hello", *, episode_id: str = "ep") -> Event:
    """A root interaction of a given size, ids counting up."""
    return Event(
        run_id="run",
        episode_id=episode_id,
        interaction_id=new_id("chatcmpl"),
        fact=InteractionRecorded(prompt_length=n_prompt),
        messages=encode_messages(Messages(request=[{"role": "user", "content": text}], reply={"content": text})),
        prompt_ids=np.arange(n_prompt, dtype=np.int32),
        output_ids=np.arange(n_output, dtype=np.int32),
        logprobs=np.linspace(-3, 0, n_output, dtype=np.float32),
        versions=np.zeros(n_output, np.int32),
    )


def same(a: Event, b: Event) -> bool:
    """Equal, arrays bit for bit."""
    for name in a.__struct_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            if x is None or y is None or x.dtype != y.dtype or x.tobytes() != y.tobytes():
                return False
        elif x != y:
            return False
    return True
