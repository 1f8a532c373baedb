"""Ids put together from words are those that the tokenizer gives, for every pattern that we say we know."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rollbook.proxy import tokenizer as ours
from rollbook.proxy.tokenizer import _MOST_NEW, _PATTERNS, Words

CORPUS = [
    "the cat sat on the mat.\n\nThe dog's 12 bones, 345 stones!\n  def f(x):\n\treturn x + 1\r\n",
    "I'll don't we've they're it's WE'LL  double  space \u00a0 nbsp été naïve 日本語 👩‍👧 <|im_start|>user\nhello",
] * 20
SPECIALS = [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]


def trained(steps) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


KINDS = {
    "gpt2": trained([pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "smollm": trained(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **{
        f"pattern {n}": trained(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for n, pattern in enumerate(sorted(_PATTERNS))
    },
}
KINDS["pattern 0"].normalizer = normalizers.NFC()
WORDS = {name: Words(kind) for name, kind in KINDS.items()}

PIECES = (
    *(
        "the",
        "cat",
        "dog's",
        "WE'LL",
        "x",
        "Y",
        "12",
        "345",
        "1st",
        ".",
        "!",
        ",,",
        "'",
        "'s",
        "(",
        "+",
        "=>",
        "-",
        "_",
    ),
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2028", "\u180e", "\u200b", "\x1c", "\x85"),
    *("é", "e\u0301", "\u0301", "日本", "👩‍👧", "ſ", "K", "\ufffd", "\u00ad"),
    *("<|im_start|>", "<|im_end|>", "<tool_call>", "<|im_", "user\n", "assistant"),
)


@pytest.mark.parametrize("name", list(KINDS))
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30))
@settings(max_examples=400, deadline=None)
def test_ids_are_those_of_the_whole_text(name, pieces):
    text = "".join(pieces)
    assert WORDS[name].encode(text) == KINDS[name].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", list(KINDS))
@given(text=st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_ids_of_any_text_are_those_of_the_whole_text(name, text):
    assert WORDS[name].encode(text) == KINDS[name].encode(text, add_special_tokens=False).ids


REACH = {name: ours.Tokenizer(kind, "", specials={}, eos_ids=(), max_length=None) for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", list(KINDS))
@given(text=st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@settings(max_examples=200, deadline=None)
def test_a_text_has_no_fewer_tokens_than_its_length_says(name, text):
    assert REACH[name].least(text) <= len(KINDS[name].encode(text, add_special_tokens=False).ids)
    assert REACH[name].least("x " * 1000 + text) > 10


def test_what_a_tokenizer_drops_or_makes_one_counts_as_nothing():
    kind = trained([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    vocabulary = {chr(256 + n): n for n in range(68)} | {chr(n): 68 + n for n in range(256) if n not in (97, 98)}
    kind.model = models.BPE(vocab=vocabulary, merges=[])
    lossy = ours.Tokenizer(kind, "", specials={}, eos_ids=(), max_length=None)
    assert len(lossy.encode("ab" * 50 + "c")) == 1
    assert lossy.least("ab" * 50 + "c") == 1
    composed = "\u03b1\u0313\u0300\u0345" * 100  # one character each in NFC
    kind = KINDS["pattern 0"]
    assert REACH["pattern 0"].least(composed) <= len(kind.encode(composed, add_special_tokens=False).ids)
    kind = trained([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert ours.Tokenizer(kind, "", specials={}, eos_ids=(), max_length=None).least(" " * 1000) == 0


def test_text_of_many_new_words_is_encoded_too():
    text = " ".join(f"w{n:x}q" for n in range(3 * _MOST_NEW))
    assert Words(KINDS["gpt2"]).encode(text) == KINDS["gpt2"].encode(text).ids


@pytest.mark.parametrize("name", list(KINDS))
def test_kinds_that_cut_before_words_fit(name):
    assert Words.fit(KINDS[name])


def test_kinds_whose_cuts_are_not_known_do_not_fit():
    other = trained([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    other.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not Words.fit(other)
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\S+\s*"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    assert not Words.fit(other)
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not Words.fit(other)
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert Words.fit(other)
    other.normalizer = normalizers.Lowercase()
    assert not Words.fit(other)
    other.normalizer = None
    other.add_tokens([AddedToken("two words", normalized=False)])
    assert not Words.fit(other)
