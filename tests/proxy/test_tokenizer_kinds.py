"""Tokens stay exact whatever the tokenizer: merges that re-encoding would undo, and words that begin with a blank."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from proxy.talk import Talk, said, user
from rollbook.proxy.parsing import Reader, Vocabulary
from rollbook.proxy.tokenizer import Tokenizer as Ours

SPECIALS = ["<unk>", "<s>", "</s>"]
INST = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}"
    "{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)


def save(folder: Path, tokenizer: Tokenizer, template: str) -> Path:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def byte_level(folder: Path) -> Path:
    """GPT-2's kind, with merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "i"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("l", "l"), ("a", "b"), ("ab", "ab")]
    words = [*SPECIALS, *alphabet, *("".join(m) for m in merges)]
    tokenizer = Tokenizer(models.BPE({w: n for n, w in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return save(folder, tokenizer, INST)


def metaspace(folder: Path) -> Path:
    """Llama 2's kind: blanks are `▁`, one is put before the first word, unknown characters are bytes."""
    words = [
        *SPECIALS,
        *(f"<0x{b:02X}>" for b in range(256)),
        *"▁abcdefghilmnopqrstuw[]/INST:?!",
        "▁t",
        "▁th",
        "▁the",
        "▁[",
        "hi",
    ]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "["), ("h", "i")]
    tokenizer = Tokenizer(
        models.BPE({w: n for n, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(folder, tokenizer, INST)


KINDS = {"byte_level": byte_level, "metaspace": metaspace}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.anyio
async def test_case_1_sampled_ids_are_not_the_ones_that_their_text_encodes_to(kind):
    ours = Ours.load(kind)
    drifting = [ours.backend.token_to_id(t) for t in ("h", "i")]
    assert ours.encode(ours.decode(drifting)).tolist() != drifting
    async with Talk([*drifting, *ours.eos_ids], "the hi", "!", folder=kind) as talk:
        first = await talk.ask([user("a")])
        assert first.content == "hi"
        second = await talk.ask([user("a"), said(first), user("the b")])
        begin = len(first.prompt_ids)
        assert second.prompt_ids[begin : begin + 3] == [*drifting, *ours.eos_ids]
        third = await talk.ask([user("a"), said(first), user("the b"), said(second), user("the c?")])
        assert [talk.fact(r).edge for r in (second, third)] == ["extends", "extends"]
        talk.check_book()


@pytest.mark.anyio
async def test_what_is_new_is_encoded_as_in_the_middle_of_the_whole(kind):
    async with Talk("", "the", folder=kind) as talk:
        ours = talk.tokenizer
        told = [user("a the b")]
        first_text = ours.render(told, add_generation_prompt=True)
        whole_text = ours.render(
            [*told, {"role": "assistant", "content": "hi"}, user("the c")], add_generation_prompt=True
        )
        whole = ours.encode(whole_text).tolist()
        n_prompt = len(ours.encode(first_text))
        end = len(whole) - whole[::-1].index(ours.eos_ids[0])
        talk.replies[0] = whole[n_prompt:end]  # what a model that spells as the tokenizer does would sample
        first = await talk.ask(told)
        second = await talk.ask([*told, said(first), user("the c")])
        assert second.prompt_ids == whole


@given(text=st.text("hi the!?é👩‍👧\ufffd\n", max_size=30), cuts=st.lists(st.integers(1, 80), max_size=8))
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("name", list(KINDS))
def test_a_reply_is_shown_as_it_decodes_in_one_go(name, text, cuts):
    vocabulary = VOCABULARIES[name]
    ids = vocabulary.tokenizer.encode(text)
    reader, shown = Reader(vocabulary), ""
    places = sorted({0, len(ids), *(c for c in cuts if c < len(ids))})
    for begin, end in zip(places, places[1:], strict=False):  # noqa: RUF007
        shown += "".join(p.text for p in reader.push(ids[begin:end], ids[begin:end].astype("f4")))
    shown += "".join(p.text for p in reader.finish())
    assert shown == (reader.content or "") == vocabulary.tokenizer.decode(ids) == text


@pytest.fixture(scope="module", autouse=True)
def vocabularies(tmp_path_factory):
    for name, make in KINDS.items():
        VOCABULARIES[name] = Vocabulary(Ours.load(make(tmp_path_factory.mktemp(name))))


VOCABULARIES: dict[str, Vocabulary] = {}


def test_a_character_of_many_tokens_is_context_as_a_whole():
    vocabulary = VOCABULARIES["metaspace"]
    stream = vocabulary.stream()
    text = "👧\n\n"
    assert "".join(stream.push([i]) for i in vocabulary.tokenizer.encode(text).tolist()) + stream.finish() == text


def test_the_kinds_differ():
    assert VOCABULARIES["byte_level"].pieces is not None
    assert VOCABULARIES["metaspace"].pieces is None
