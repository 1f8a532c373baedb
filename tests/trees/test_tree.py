"""Who continues whom, message by message; the numbered cases are those of the field's bug reports."""

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store import Event, InteractionRecorded, Messages
from rollbook.store.events import encode_messages
from rollbook.store.tree import Match, Rules, TreeIndex, classify, shared_prefix

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def assistant(text: str | None, *calls: tuple[str, str, str], **extra: Any) -> Message:
    message: Message = {"role": "assistant", "content": text, **extra}
    if calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, name, arguments in calls
        ]
    return message


def tool(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


class Episode:
    """An index, and the turns put into it."""

    def __init__(self, **rules: Any) -> None:
        self.index = TreeIndex(Rules(**rules))

    def turn(
        self, name: str, messages: list[Message], reply: Message, tools: Any = (), parent: str | None = None
    ) -> Match:
        match = self.index.resolve(messages, tools, parent)
        self.index.add(name, match, reply)
        return match


ASK = [system("be brief"), user("2*3?")]
CALL = assistant("I will multiply. \n", ("call_1", "multiply", '{"b": 4,"a":  3.0}'))
RESULT = tool("call_1", "12.0")


def after(first: Message, resent: Message, **rules: Any) -> Match:
    """How a second turn is matched when the client sends `first` back as `resent`."""
    episode = Episode(**rules)
    episode.turn("n1", ASK, first)
    return episode.index.resolve([*ASK, resent, user("and now?")])


def test_an_appended_history_extends_its_parent():
    match = after(assistant("six"), assistant("six"))
    assert (match.parent_id, match.n_matched, match.edge, match.cause) == ("n1", 3, "extends", None)
    assert (match.rules, match.is_lossy, match.resent, match.kept) == ((), False, None, None)


def test_case_1_a_child_prompt_that_kept_the_sampled_tokens_extends():
    match = after(assistant("drift"), assistant("drift"))
    placed = classify(match, [1, 2, 53122, 316], [1, 2, 53122, 316, 9])
    assert (placed.edge, placed.shared, placed.differs_at) == ("extends", 4, None)
    drifted = classify(match, [1, 2, 53122, 316], [1, 2, 393, 30002, 9])
    assert (drifted.edge, drifted.shared, drifted.differs_at) == ("rerendered", 2, 2)


@pytest.mark.parametrize(
    ("answered", "resent"),
    [
        (assistant("<think>x</think>ok"), assistant("ok")),
        (assistant("x</think>\n\nok"), assistant("ok")),
        (assistant("ok", reasoning_content="x"), assistant("ok")),
        (assistant("ok", reasoning="x"), assistant("ok")),
    ],
)
def test_case_2_stripped_thinking_is_the_same_node_rendered_anew(answered: Message, resent: Message):
    match = after(answered, resent)
    assert (match.parent_id, match.rules, match.is_lossy) == ("n1", ("reasoning",), True)
    assert match.resent == resent
    placed = classify(match, [1, 2, 70, 71, 72, 8], [1, 2, 8, 9])
    assert (placed.edge, placed.cause, placed.differs_at) == ("rerendered", "reasoning removed", 2)


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        ('{"b":1,"a":2}', '{"a": 2, "b": 1}'),
        ('{"city":"Z\\u00fcrich"}', '{"city": "Zürich"}'),
        ('{"b": 4,"a":  3.0}', '{"b":4,"a":3}'),
        ("", "{}"),
    ],
)
def test_case_3_arguments_written_again_are_the_same_arguments(sent: str, back: str):
    first, resent = assistant(None, ("c", "f", sent)), assistant(None, ("c", "f", back))
    for changed_id in ("c", "d"):  # with and without the anchor of the call's id
        resent["tool_calls"][0]["id"] = changed_id
        assert after(first, resent).parent_id == "n1"


def test_case_3_other_arguments_under_another_id_are_another_turn():
    match = after(assistant(None, ("c", "f", '{"a":1}')), assistant(None, ("d", "f", '{"a":2}')))
    assert (match.parent_id, match.cause) == (None, "history edited")


@pytest.mark.parametrize("content", ["", None, "absent", [], [{"type": "text", "text": ""}]])
def test_case_4_no_content_beside_calls_is_one_thing(content: Any):
    resent = assistant(content, ("c", "f", "{}"), refusal=None, annotations=[], reasoning_content=None, index=0)
    if content == "absent":
        del resent["content"]
    match = after(assistant(None, ("c", "f", "{}")), resent)
    assert (match.parent_id, match.is_lossy) == ("n1", False)


def test_case_4_a_string_is_one_text_part_and_parts_are_joined():
    for parts in ([{"type": "text", "text": "six"}], [{"type": "text", "text": "s"}, {"type": "text", "text": "ix"}]):
        match = after(assistant("six"), {"role": "assistant", "content": parts})
        assert (match.parent_id, match.is_lossy) == ("n1", False)


def test_case_5_calls_are_matched_by_position_when_ids_do_not_serve():
    def history(*ids: str) -> list[Message]:
        return [
            *ASK,
            assistant(None, (ids[0], "f", '{"x":1}'), (ids[1], "f", '{"x":2}')),
            tool(ids[0], "one"),
            tool(ids[1], "two"),
        ]

    episode = Episode()
    first = history("call_0", "call_0")
    episode.turn("n1", ASK, first[2])
    episode.turn("n2", first, assistant("both"))
    for ids in (("call_0", "call_0"), ("", ""), ("x", "y")):
        match = episode.index.resolve([*history(*ids), assistant("both"), user("more")])
        assert match.parent_id == "n2"
        turn = Episode()
        turn.turn("n1", ASK, first[2])
        assert "call ids" in turn.index.resolve(history(*ids)).rules or ids == ("call_0", "call_0")
    swapped = history("x", "y")
    swapped[3], swapped[4] = swapped[4], swapped[3]
    assert episode.index.resolve([*swapped, assistant("both"), user("more")]).parent_id != "n2"


def test_case_8_other_tools_are_another_root():
    episode = Episode()
    first = episode.turn("n1", ASK, assistant("six"), tools=[])
    second = episode.turn("n2", ASK, assistant("six"), tools=[function("bash")])
    assert (first.parent_id, second.parent_id, second.repeats_id) == (None, None, None)
    assert first.prefix_hash != second.prefix_hash
    history = [*ASK, assistant("six"), user("more")]
    assert episode.index.resolve(history, [function("bash")]).parent_id == "n2"
    changed = episode.index.resolve(history, [function("python")])
    assert (changed.edge, changed.cause, changed.kept) == ("rerendered", "tools changed", 0)


def test_case_9_a_volatile_system_line_is_no_other_conversation():
    def ask(stamp: str) -> list[Message]:
        return [system(f"x-anthropic-billing-header: cc={stamp};\nbe brief\nToday's date is {stamp}."), user("hi")]

    def second(episode: Episode) -> Match:
        episode.turn("n1", ask("11"), assistant("yes"))
        return episode.index.resolve([*ask("22"), assistant("yes"), user("more")])

    match = second(Episode())
    assert (match.parent_id, match.edge, match.rules) == ("n1", "extends", ("system line",))
    match = second(Episode(volatile=()))
    assert (match.parent_id, match.edge, match.cause) == ("n1", "rerendered", "system only")
    assert (match.kept, match.n_matched) == (0, 0)


def test_case_12_interleaved_agents_are_two_paths():
    episode = Episode()
    a, b = [system("A"), user("go")], [system("B"), user("go")]
    episode.turn("a1", a, assistant("ok"))
    episode.turn("b1", b, assistant("ok"))
    assert episode.turn("a2", [*a, assistant("ok"), user("on")], assistant("done")).parent_id == "a1"
    assert episode.turn("b2", [*b, assistant("ok"), user("on")], assistant("done")).parent_id == "b1"
    back = episode.index.resolve([*a, assistant("ok"), user("another way")])
    assert (back.parent_id, back.edge, back.cause) == ("a1", "extends", None)


def test_case_13_a_retry_hangs_on_what_it_repeats_and_the_path_goes_on_from_it():
    episode = Episode()
    episode.turn("n1", ASK, assistant("six"))
    again = episode.index.resolve(ASK)
    assert again.repeats_id == "n1"
    retry = again.as_retry()
    assert (retry.parent_id, retry.edge, retry.kept, retry.n_matched) == ("n1", "retries", 2, 2)
    assert classify(retry, [1, 2, 9], [1, 2]).edge == "retries"
    episode.index.add("n2", retry, assistant("6"))
    assert episode.index.resolve([*ASK, assistant("6"), user("more")]).parent_id == "n2"


def test_case_14_identical_requests_are_so_many_nodes():
    episode = Episode()
    matches = [episode.turn(f"n{i}", ASK, assistant(f"sample {i}")) for i in range(4)]
    assert [m.parent_id for m in matches] == [None] * 4
    assert [m.repeats_id for m in matches] == [None, "n0", "n1", "n2"]
    assert len(episode.index) == 4
    for i in range(4):
        assert episode.index.resolve([*ASK, assistant(f"sample {i}"), user("more")]).parent_id == f"n{i}"


def chat(episode: Episode, n_turns: int) -> list[Message]:
    history = [system("a careful engineer")]
    for turn in range(n_turns):
        history.append(user(f"step {turn}"))
        reply = assistant(f"did step {turn}, and here is what came out of it in some more words")
        episode.turn(f"t{turn}", history[:], reply)
        history.append(reply)
    return history


def test_case_15_a_summary_in_place_of_turns_is_a_compaction():
    episode = Episode()
    history = chat(episode, 20)
    told = user("Continued from a previous conversation that ran out of context: steps 0 to 19 are done.")
    match = episode.turn("c0", [history[0], told], assistant("on it"))
    assert (match.parent_id, match.edge, match.cause, match.n_matched, match.kept) == (
        "t19",
        "compacts",
        "summary",
        0,
        0,
    )
    placed = classify(match, [1, 2, 3, 4], [1, 2, 9])
    assert (placed.edge, placed.shared, placed.differs_at) == ("compacts", 0, 2)
    went_on = episode.index.resolve([history[0], told, assistant("on it"), user("step 21")])
    assert (went_on.parent_id, went_on.edge) == ("c0", "extends")


def test_case_15_a_summary_that_the_model_wrote_is_found_by_its_text():
    episode = Episode()
    history = chat(episode, 5)
    summary = assistant("Five steps were taken; the parser is fixed and two tests are left to write.")
    episode.turn("s", [*history, user("Write down where we are.")], summary)
    match = episode.index.resolve([history[0], user(f"Background:\n{summary['content']}\nGo on.")])
    assert (match.parent_id, match.edge, match.cause) == ("s", "compacts", "summary")


def test_case_15_a_summary_before_kept_turns_is_found_by_what_was_kept():
    episode = Episode()
    history = chat(episode, 10)
    match = episode.index.resolve([history[0], user("Earlier: eight steps."), *history[-4:], user("go on")])
    assert (match.parent_id, match.edge, match.cause) == ("t9", "compacts", "summary")
    match = episode.index.resolve([history[0], *history[-4:], user("go on")])
    assert (match.parent_id, match.edge, match.cause) == ("t9", "compacts", "history cut")


@pytest.mark.parametrize(
    ("text", "is_compaction"),
    [
        ("Write a summary of the file README.md", False),
        ("Summarise chapter 2", False),
        ("Here is a summary of our conversation: steps 1 to 9 are done", True),
        ("<summary>steps 1 to 9 are done</summary> Go on.", True),
        ("The history has been condensed. Done: steps 1 to 9.", True),
        ("This session is being continued from a previous conversation that ran out of context.", True),
    ],
)
def test_case_15_a_task_about_summaries_is_no_compaction(text: str, is_compaction: bool):
    episode = Episode()
    history = chat(episode, 5)
    match = episode.index.resolve([history[0], user(text)])
    assert (match.edge == "compacts") == is_compaction


def test_an_edited_history_forks_where_it_was_edited_and_says_so():
    episode = Episode()
    history = chat(episode, 4)
    history[5] = user("another step 2")
    match = episode.index.resolve([*history, user("go on")])
    assert (match.parent_id, match.edge, match.cause, match.n_matched) == ("t1", "extends", "history edited", 5)


def test_case_16_a_title_call_is_a_root_of_its_own():
    episode = Episode()
    chat(episode, 3)
    match = episode.index.resolve([system("Write a title for this chat."), user("step 0")])
    assert (match.parent_id, match.edge, match.cause) == (None, None, None)


def test_case_17_a_thousand_turns_take_less_than_a_second():
    episode = Episode()
    history = [system("s" * 500)]
    requests = []
    for turn in range(1000):
        history.append(user(f"question {turn} " + "x" * 100))
        requests.append([dict(m) for m in history] if turn % 50 == 0 else history[:])
        history.append(assistant(f"answer {turn} " + "y" * 100))
    began = time.process_time()
    for turn, request in enumerate(requests):
        match = episode.turn(f"t{turn}", request, history[2 * turn + 2])
        assert match.parent_id == (f"t{turn - 1}" if turn else None)
    assert time.process_time() - began < 1


def test_ten_thousand_turns_need_no_recursion():
    episode = Episode()
    history: list[Message] = []
    for turn in range(10_000):
        history.append(user(f"q{turn}"))
        reply = assistant(f"a{turn}")
        match = episode.turn(f"t{turn}", history[:] if turn % 500 == 499 else history, reply)
        history = [*history, reply] if turn % 500 == 499 else history
        if turn % 500 != 499:
            history.append(reply)
        assert match.parent_id == (f"t{turn - 1}" if turn else None)
    foreign = TreeIndex()
    assert foreign.resolve(history).parent_id is None  # ten thousand replies that nobody here gave
    del episode, foreign


def test_a_named_parent_needs_only_what_is_new():
    episode = Episode()
    episode.turn("n1", ASK, CALL)
    match = episode.turn("n2", [system("be brief"), RESULT], assistant("12"), parent="n1")
    assert (match.parent_id, match.edge, match.n_matched) == ("n1", "extends", 1)
    full = episode.index.resolve([*ASK, CALL, RESULT, assistant("12"), user("thanks")])
    assert full.parent_id == "n2"
    assert episode.index.resolve([*ASK, CALL, RESULT], parent_id="n1").n_matched == 3
    with pytest.raises(KeyError, match="n9"):
        episode.index.resolve([RESULT], parent_id="n9")


def test_the_same_id_twice_changes_nothing():
    episode = Episode()
    match = episode.turn("n1", ASK, assistant("six"))
    assert episode.index.add("n1", match, assistant("six")) == episode.index.add("n1", match, assistant("seven"))
    assert len(episode.index) == 1
    assert "n1" in episode.index


def test_shared_prefix_is_the_index_of_the_first_difference():
    assert shared_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert shared_prefix(np.array([1, 2], np.int32), [1, 2, 4]) == 2
    assert shared_prefix([], [1]) == 0


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, list[Message], Message, list[Any]]]:
    """Turns of several conversations that fork, in one legal order: (name, request, reply, tools)."""
    tools = [[], [function("bash")]]
    openings = [[user("go")], [system("A"), user("go")], [system("B"), user("go")]]
    turns: list[tuple[str, list[Message], Message, list[Any]]] = []
    for i in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from([None, *range(i)]))
        if parent is None:
            request, offered = draw(st.sampled_from(openings)), draw(st.sampled_from(tools))
        else:
            _, before, answer, offered = turns[parent]
            more = draw(st.lists(st.sampled_from([user("on"), user("else"), user("")]), min_size=0, max_size=2))
            request = [*before, answer, *more]
        reply = assistant(draw(st.sampled_from(["ok", "no", "", f"only {i}"])))
        turns.append((f"n{i}", request, reply, offered))
    return turns


def expected_parent(turn: Any, before: list[Any]) -> Any:
    """The plain way: what the longest earlier request + reply that begins this request says; None for a root."""
    _, request, _, tools = turn
    said = [[*r, a] for _, r, a, t in before if t == tools and [*r, a] == request[: len(r) + 1]]
    return max(said, key=len, default=None)


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(conversations(), st.randoms())
@settings(max_examples=150, deadline=None)
def test_any_interleaving_gives_the_same_tree(turns: list[Any], random: Any):
    by_name = {name: (request, reply) for name, request, reply, _ in turns}
    # Another legal order: a turn may come as soon as its history was said.
    shuffled: list[Any] = []
    waiting = list(turns)
    while waiting:
        ready = [
            t
            for t in waiting
            if len(t[1]) < 3 or expected_parent(t, shuffled) == expected_parent(t, [u for u in turns if u is not t])
        ]
        taken = random.choice(ready or waiting[:1])
        waiting.remove(taken)
        shuffled.append(taken)
    for order in (turns, shuffled):
        index = TreeIndex(Rules(summary="(?!)"))
        for k, turn in enumerate(order):
            name, request, reply, tools = turn
            match = index.resolve(copied(request), copied(tools))
            want = expected_parent(turn, order[:k])
            if match.edge == "extends":
                parent_request, parent_reply = by_name[match.parent_id]
                assert [*parent_request, parent_reply] == want
                assert match.n_matched == len(want)
            else:
                assert want is None
            index.add(name, match, copied(reply))


def recorded(turns: list[Any], index: TreeIndex) -> list[Event]:
    """The events that a proxy would write, and the index that it would have."""
    events = []
    for name, request, reply, tools in turns:
        match = index.resolve(copied(request), copied(tools))
        messages = Messages(
            request=list(match.messages[match.n_matched :]),
            reply=copied(reply),
            tools=copied(tools) if match.parent_id is None or match.kept == 0 else None,
            resent=match.resent,
            kept=match.kept,
        )
        reply_hash = index.add(name, match, copied(reply))
        fact = InteractionRecorded(
            parent_id=match.parent_id,
            edge=match.edge,
            prompt_length=0,
            prefix_hash=match.prefix_hash,
            reply_hash=reply_hash,
        )
        events.append(
            Event(run_id="r", episode_id="e", interaction_id=name, fact=fact, messages=encode_messages(messages))
        )
    return events


@given(conversations())
@settings(max_examples=100, deadline=None)
def test_an_index_from_events_knows_what_the_living_one_knew(turns: list[Any]):
    living = TreeIndex()
    events = recorded(turns, living)
    rebuilt = TreeIndex.from_events([*events, *events])
    assert len(rebuilt) == len(living)
    for _, request, reply, tools in turns:
        for messages in (request, [*request, reply], [*request, reply, user("new")]):
            a, b = living.resolve(messages, tools), rebuilt.resolve(messages, tools)
            assert (a.parent_id, a.edge, a.n_matched, a.prefix_hash, a.rules) == (
                b.parent_id,
                b.edge,
                b.n_matched,
                b.prefix_hash,
                b.rules,
            )


@pytest.mark.parametrize(
    "history",
    [
        [system("A"), user("go"), assistant("ok", reasoning_content="hm"), user("on")],
        [system("A"), user("go"), assistant(None, ("c", "f", '{"a": 1.0}')), tool("c", "1"), assistant("x"), user("y")],
    ],
)
def test_an_index_from_events_keeps_what_the_client_sent_back(history: list[Message]):
    episode = TreeIndex()
    turns: list[Any] = []
    for at, message in enumerate(history):
        if message["role"] == "assistant":
            sent = [
                {k: v for k, v in m.items() if k != "reasoning_content"} if m["role"] == "assistant" else m
                for m in history[:at]
            ]
            turns.append((f"n{at}", sent, message, []))
    events = recorded(turns, episode)
    rebuilt = TreeIndex.from_events(events)
    sent = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in history]
    a, b = episode.resolve(sent), rebuilt.resolve(sent)
    assert (a.parent_id, a.prefix_hash, a.rules) == (b.parent_id, b.prefix_hash, b.rules)
    assert a.parent_id == turns[-1][0]


def test_a_retry_and_a_compaction_are_rebuilt_from_events():
    living = TreeIndex()
    turns = [("a", ASK, assistant("six"), [])]
    events = recorded(turns, living)
    retry = living.resolve(ASK).as_retry()
    living.add("b", retry, assistant("6"))
    events.append(
        Event(
            run_id="r",
            episode_id="e",
            interaction_id="b",
            fact=InteractionRecorded(parent_id="a", edge="retries", prompt_length=0),
            messages=encode_messages(Messages(request=[], reply=assistant("6"), kept=retry.kept)),
        )
    )
    rebuilt = TreeIndex.from_events(events)
    assert rebuilt.resolve([*ASK, assistant("6"), user("more")]).parent_id == "b"
    assert rebuilt.resolve(ASK).repeats_id == "b"
