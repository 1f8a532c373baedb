"""Replies read the same however their tokens came, and nothing that was shown is taken back."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.proxy.parsing import (
    HermesParser,
    JsonParser,
    LlamaParser,
    MistralParser,
    Reader,
    ThinkParser,
    Vocabulary,
    _AnyText,
    read_text,
)
from rollbook.proxy.tokenizer import Tokenizer

BYTES = Tokenizer.load("bytes")
VOCABULARY = Vocabulary(BYTES)
FIRST_BYTE_ID = 7


def ids_of(text: str) -> list[int]:
    return BYTES.encode(text).tolist()


def read(ids, cuts=(), *, stop=(), parsers=(), **more):
    """(reader, pieces) of ids that come cut at these places."""
    reader = Reader(VOCABULARY, stop=stop, stop_ids=(2,), parsers=[p() for p in parsers], keep_tokens=True, **more)
    pieces = []
    places = sorted({0, len(ids), *(c for c in cuts if c < len(ids))})
    for begin, end in pairwise(places):
        if reader.is_stopped:
            break
        part = np.asarray(ids[begin:end], np.int32)
        pieces += reader.push(part, -part.astype(np.float32))
    return reader, [*pieces, *reader.finish()]


def shown(pieces):
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if piece.tool_index is not None:
            calls.setdefault(piece.tool_index, ["", ""])
            calls[piece.tool_index][0] += piece.tool_name or ""
            calls[piece.tool_index][1] += piece.tool_arguments
    return "".join(p.text for p in pieces), "".join(p.reasoning for p in pieces), list(map(tuple, calls.values()))


def whole(reader):
    return reader.content or "", reader.reasoning or "", [(c.name, c.arguments) for c in reader.tool_calls]


TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_ca"]
TEXTS = ["\n", "\n\n", " ", "ok", "é", "👩‍👧", "{", "}", '"', "\\", ",", "STOP", "ST", "a"]
CALLS = [
    '{"name": "f", "arguments": {"x": "}"}}',
    '{"name":"g","arguments":{}}',
    '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"arguments": {"a": [1]}, "name": "h"}',
    '{"name": "f", "arguments": {"a": }}',
]
PARTS = st.sampled_from(TAGS + TEXTS + CALLS)
REPLIES = st.lists(PARTS, max_size=12).map("".join)
CUTS = st.lists(st.integers(1, 200), max_size=12)


@given(REPLIES, CUTS, st.sampled_from([(), ("STOP",), ("STOP", "a")]))
@settings(max_examples=300, deadline=None)
def test_a_reply_reads_the_same_however_it_was_cut(text, cuts, stop):
    parsers = (ThinkParser, HermesParser)
    ids = [*ids_of(text), 2]
    at_once, _ = read(ids, stop=stop, parsers=parsers)
    reader, pieces = read(ids, cuts, stop=stop, parsers=parsers)
    assert whole(reader) == whole(at_once) == shown(pieces)
    assert reader.n_taken == at_once.n_taken
    assert reader.cut == at_once.cut
    assert [t for p in pieces for t in p.token_ids] == ids[: reader.n_taken]
    assert [x for p in pieces for x in p.logprobs] == [-t for t in ids[: reader.n_taken]]


@given(st.binary(max_size=40), CUTS)
@settings(max_examples=200, deadline=None)
def test_bytes_are_shown_as_whole_characters_and_never_taken_back(data, cuts):
    byte_ids = [BYTES.backend.token_to_id(c) for c in BYTES.backend.pre_tokenizer.pre_tokenize_str("x")[0][0]]
    assert byte_ids
    table = {piece: i for i, piece in enumerate(VOCABULARY.pieces) if i >= FIRST_BYTE_ID}
    ids = [table[bytes([b])] for b in data]
    reader, pieces = read(ids, cuts)
    assert "".join(p.text for p in pieces) == BYTES.decode(ids) == data.decode(errors="replace")
    assert reader.n_taken == len(ids)


@given(REPLIES, CUTS)
@settings(max_examples=100, deadline=None)
def test_a_tokenizer_that_is_not_of_bytes_decodes_the_same(text, cuts):
    ids = ids_of(text)
    stream, said = _AnyText(BYTES), ""
    places = sorted({0, len(ids), *(c for c in cuts if c < len(ids))})
    for begin, end in pairwise(places):
        said += stream.push(ids[begin:end])
    assert said + stream.finish() == text


@given(REPLIES, st.lists(st.sampled_from(["STOP", "a", "é", "}}", "</tool_call>"]), min_size=1, max_size=2), CUTS)
@settings(max_examples=200, deadline=None)
def test_a_stop_string_ends_at_its_first_place_and_the_token_that_completes_it_counts(text, stop, cuts):
    ids = ids_of(text)
    reader, pieces = read(ids, cuts, stop=stop)
    ends = {len(ids_of(text[:end])): end for end in range(len(text) + 1)}
    for n in range(len(ids) + 1):  # the fewest tokens in whose text a stop string is
        before = BYTES.decode(ids[:n])
        if any(s in before for s in stop):
            assert reader.n_taken == n
            expected = before[: min(before.find(s) for s in stop if s in before)]
            assert shown(pieces)[0] == expected
            assert BYTES.decode(ids[: reader.cut.n_tokens]) + reader.cut.text == expected
            break
    else:
        assert not reader.is_stopped
        assert shown(pieces)[0] == text
    assert ends


def test_special_tokens_are_not_text():
    reader, _ = read([*ids_of("a<|im_start|>b"), 2])
    assert reader.content == "ab"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"b":1, "a": 2}}</tool_call>', None, [("f", '{"b":1, "a": 2}')]),
        ('say\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "say\n", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {"a": "}"}}</tool_call>', None, [("f", '{"a": "}"}')]),
        ('<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call>', None, [("f", '{"a":1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 3}</tool_call>', None, [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', None, [("f", '{"a": }')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>', None, [("f", '{"a": "x')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x', None, [("f", '{"a": "x')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', None, [("f", '{"a": 1}')]),
        ("<tool_call>not json</tool_call> so", "<tool_call>not json</tool_call> so", []),
        ('<tool_call>{"nam', '<tool_call>{"nam', []),
        ("a < b <tool", "a < b <tool", []),
        ('<tool_call>{"name": "\\u00e9", "arguments": {"a": "\\\\"}}</tool_call>x', "x", [("é", '{"a": "\\\\"}')]),
        (
            '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>',
            None,
            [("f", "{}"), ("g", "{}")],
        ),
    ],
)  # fmt: skip
def test_hermes_calls(text, content, calls):
    got, _, found = read_text(text, [HermesParser()])
    assert (got, [(c.name, c.arguments) for c in found]) == (content, calls)
    assert len({c.id for c in found}) == len(found)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "arguments": {"a":1}}', None, [("f", '{"a":1}')]),
        (' [{"name": "f", "parameters": {}}, {"name": "g", "arguments": {}}]', None, [("f", "{}"), ("g", "{}")]),
        ('{"answer": 1}', '{"answer": 1}', []),
        ('{"name": "f", "arguments": {"a":', '{"name": "f", "arguments": {"a":', []),
        ("[]", "[]", []),
        ("plain {}", "plain {}", []),
    ],
)
def test_json_calls(text, content, calls):
    got, _, found = read_text(text, [JsonParser()])
    assert (got, [(c.name, c.arguments) for c in found]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<|python_tag|>{"name": "f", "parameters": {"a": ";"}}', None, [("f", '{"a": ";"}')]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": "}; {"}}', None, None),
        (
            '{"name": "f", "parameters": {}} ; {"name": "g", "arguments": {"b":2}}',
            None,
            [("f", "{}"), ("g", '{"b":2}')],
        ),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("<|pyth", "<|pyth", []),
        ("so {", "so {", []),
    ],
)
def test_llama_calls(text, content, calls):
    got, _, found = read_text(text, [LlamaParser()])
    if calls is None:  # not told apart without reading the JSON: it stays text, to the letter
        assert got == text
    else:
        assert (got, [(c.name, c.arguments) for c in found]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a":1}}, {"name": "g"}]', None, [("f", '{"a":1}'), ("g", "{}")]),
        ('so [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{', "so ", [("f", '{"a": 1}'), ("g", "{")]),
        ("[TOOL_CALLS]what", "[TOOL_CALLS]what", []),
        ("a [TOOL", "a [TOOL", []),
    ],
)
def test_mistral_calls(text, content, calls):
    for cut in range(len(text) + 1):
        reader = Reader(VOCABULARY, parsers=[MistralParser()])
        reader.push_text(text[:cut])
        reader.push_text(text[cut:])
        reader.finish()
        assert (reader.content, [(c.name, c.arguments) for c in reader.tool_calls]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nx\ny\n</think>\n\nok", False, "x\ny", "ok"),
        ("\n<think>x</think>ok", False, "x", "ok"),
        ("x\n</think>\nok", True, "x", "ok"),
        ("<think>\nx</think>", True, "x", ""),
        ("<think>x", False, "x", ""),
        ("<think>\n\n</think>\n\nok", False, None, "ok"),
        ("ok <think>x</think>", False, None, "ok <think>x</think>"),
        ("<thin", False, None, "<thin"),
    ],
)
def test_thoughts(text, is_open, reasoning, content):
    got, thought, _ = read_text(text, [ThinkParser(is_open=is_open)])
    assert (thought, got) == (reasoning, content)


def test_arguments_stream_before_the_call_is_whole():
    ids = ids_of('<tool_call>{"name": "write", "arguments": {"text": "' + "x" * 100)
    _, pieces = read(ids, range(0, 200, 10), parsers=(HermesParser,))
    named = next(n for n, p in enumerate(pieces) if p.tool_name)
    assert sum(bool(p.tool_arguments) for p in pieces[named:]) > 5


def test_call_ids_are_ours_and_never_the_same_twice():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 3
    ids = [c.id for _ in range(3) for c in read_text(text, [HermesParser()])[2]]
    assert len(set(ids)) == 9
    assert all(i.startswith("call_") and len(i) <= 40 for i in ids)


def test_a_long_reply_with_stop_strings_costs_by_its_length():
    import time

    def cost(n):
        ids = ids_of("word " * n)
        begin = time.process_time()
        read(ids, range(len(ids)), stop=("STOP",))
        return time.process_time() - begin

    cost(10)
    assert cost(4000) < 8 * 4 * cost(1000)


def test_pieces_are_small_on_the_wire():
    _, pieces = read(ids_of("hi"), parsers=(ThinkParser, HermesParser))
    assert msgspec.json.decode(msgspec.json.encode(pieces[0])) == {
        "text": "hi",
        "token_ids": ids_of("hi"),
        "logprobs": [-float(i) for i in ids_of("hi")],
    }
