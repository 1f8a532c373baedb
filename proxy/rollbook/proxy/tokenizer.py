"""A model folder's tokenizer and chat template, without transformers.

Reads `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
`chat_template.jinja` as Hugging Face writes them. Templates run in the sandbox with the names that they expect there,
so that the same folder gives the same text here and in transformers. What to render is `render.py`'s business.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, Self

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec
import numpy as np
import tokenizers

from rollbook.store.events import Int32s

from .errors import BadRequest

_LONG = 50_000
"""Characters of a text whose tokenisation others would notice."""

_NO_LIMIT = 10**9
"""transformers writes int(1e30) where a tokenizer knows no length."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

TOKENIZERS = Path(__file__).parent / "tokenizers"
TEMPLATES = Path(__file__).parent / "templates"


class Tokenizer:
    """Token ids for text and back, and text for messages."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str,
        *,
        specials: dict[str, Any],
        eos_ids: tuple[int, ...],
        max_length: int | None,
        response_template: dict[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.eos_ids = eos_ids
        self.max_length = max_length
        self.response_template = response_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added = {token.content: i for i, token in added.items()}
        self._specials = specials
        environment = _environment()
        try:
            self._template = environment.from_string(chat_template)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}; point to one that can") from error
        self.template_names = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(chat_template)))
        self._globals = {**self._template.globals, "documents": None, **specials}
        self._words = Words(backend) if Words.fit(backend) else None
        self._longest, self._lost, self._made_one = _reach(backend)

    @classmethod
    def load(cls, folder: str | Path, *, chat_template: str | Path | None = None) -> Self:
        """The tokenizer in a model folder, or one that ships with us (`bytes`).

        chat_template: a file to use instead of the folder's own, or the name of one that ships with us
        (`chatml_tools`). Raises FileNotFoundError, and ValueError where there is no template.
        """
        path = Path(folder)
        if not (path / "tokenizer.json").is_file() and (TOKENIZERS / str(folder)).is_dir():
            path = TOKENIZERS / str(folder)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {path}; give the folder of a model in Hugging Face layout")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{file} is not a tokenizer: {error}; copy the model folder again") from error
        config = _json(path / "tokenizer_config.json")
        specials = _specials(_json(path / "special_tokens_map.json")) | _specials(config)
        eos = _json(path / "generation_config.json").get("eos_token_id", ())
        ids = [int(i) for i in (eos if isinstance(eos, list) else [eos] if eos != () and eos is not None else [])]
        named = backend.token_to_id(specials["eos_token"]) if specials.get("eos_token") else None
        if named is not None and named not in ids:
            ids.append(named)
        limit = config.get("model_max_length")
        return cls(
            backend,
            _chat_template(path, config, chat_template),
            specials=specials,
            eos_ids=tuple(ids),
            max_length=int(limit) if limit is not None and limit < _NO_LIMIT else None,
            response_template=config.get("response_template"),
        )

    def encode(self, text: str) -> Int32s:
        """int32 [n]; nothing is added at either end, special tokens written out in the text become their ids."""
        if len(text) > _LONG:
            # The only way that lets other threads run meanwhile.
            return np.asarray(self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)
        if self._words is not None:
            return np.array(self._words.encode(text), np.int32)
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def least(self, text: str) -> int:
        """A text has at least so many tokens, by its length alone; 0 where that tells nothing. Takes no time."""
        if not self._longest:
            return 0
        n = len(text) - sum(map(text.count, self._lost))
        return -(-n // (self._longest if text.isascii() else self._longest * self._made_one))

    def decode(self, ids: "Int32s | Sequence[int]", *, skip_special_tokens: bool = False) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return self.backend.decode(plain, skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The chat template's text for a conversation. Raises BadRequest with the template's own words."""
        try:
            # What `Template.render` does, without gathering the names that are always the same each time.
            known = {
                **self._globals,
                "messages": messages,
                "tools": tools or None,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            }
            return "".join(self._template.root_render_func(self._template.new_context(known, shared=True)))
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error.message}", param="messages"
            ) from error
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise BadRequest(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from error


# ---------------------------------------------------------------- tokens of words

_BEFORE_NUMBERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = frozenset(
    {
        # GPT-2's is what ByteLevel uses where no other is given.
        _BEFORE_NUMBERS + r"\p{N}{1,3}" + _AFTER_NUMBERS,  # Llama 3
        _BEFORE_NUMBERS + r"\p{N}" + _AFTER_NUMBERS,  # Qwen
    }
)
_LINE = re.compile(r"(?<=\S\n)(?=[A-Za-z])")
_MOST_WORDS, _MOST_NEW, _LONG_WORD = 50_000, 8, 64


class Words:
    """The ids of text, put together from those of its words: what a byte-level BPE does, remembered word by word.

    Such a tokenizer cuts text by a pattern before it merges, and no token crosses a cut. All patterns that are known
    here cut before ` x` where x is an ASCII letter and what comes before is no white space, and before x where a single
    line break comes before it. So the parts between such places can be encoded alone. Text with many new words is
    encoded as a whole.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._encode = backend.encode
        self._words: dict[str, tuple[int, ...]] = {}  # of " " + word
        self._parts: dict[str, tuple[int, ...]] = {}  # of other parts

    @staticmethod
    def fit(backend: tokenizers.Tokenizer) -> bool:
        """Whether a tokenizer is of this kind."""
        config = msgspec.json.decode(backend.to_str(), type=_Config)
        if config.model.type != "BPE" or config.model.dropout or config.truncation or config.padding:
            return False
        if config.normalizer is not None and config.normalizer.type != "NFC":
            return False
        if any(t.lstrip or t.rstrip or t.single_word or re.search(r"\s", t.content) for t in config.added_tokens):
            return False
        steps = config.steps
        is_cut = False
        for step in steps:
            if step.type == "ByteLevel" and not step.add_prefix_space:
                is_cut = is_cut or step.use_regex
            elif step.type == "Split" and step.pattern.get("Regex") in _PATTERNS and not step.invert:
                is_cut = True
            elif step.type != "Digits":
                return False
        return is_cut and bool(steps) and steps[-1].type == "ByteLevel"

    def encode(self, text: str) -> list[int]:
        """The ids of a text, as the tokenizer gives them without special tokens at its ends."""
        ids: list[int] = []
        take, known, n_new = ids.extend, self._words.get, 0
        run, *words = text.split(" ")  # run: what comes before the next place where text can be cut
        if len(words) > 2 and run[-1:].isprintable():
            with suppress(KeyError):  # prose, but for its last word: nothing has to be looked at more closely
                prose = list(map(self._words.__getitem__, words[:-1]))
                if run:
                    self._take_run(run, ids)
                take(chain.from_iterable(prose))
                run, words = "", words[-1:]
        for word in words:
            found = known(word)
            if found is None and word[:1].isalpha() and word[0].isascii() and word.isprintable():
                n_new += 1
                if n_new > _MOST_NEW:
                    return list(self._encode(text, add_special_tokens=False).ids)
                found = self._learn(self._words, word, " " + word)
            if found is None or run.endswith(" ") or not run[-1:].isprintable():
                run = f"{run} {word}"
                continue
            if run:
                self._take_run(run, ids)
                run = ""
            take(found)
        if run:
            self._take_run(run, ids)
        return ids

    def _take_run(self, run: str, ids: list[int]) -> None:
        for part in _LINE.split(run):
            found = self._parts.get(part)
            ids.extend(self._learn(self._parts, part, part) if found is None else found)

    def _learn(self, memory: dict[str, tuple[int, ...]], name: str, text: str) -> tuple[int, ...]:
        ids = tuple(self._encode(text, add_special_tokens=False).ids)
        if len(text) <= _LONG_WORD:
            if len(memory) >= _MOST_WORDS:
                memory.clear()
            memory[name] = ids
        return ids


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


BYTES = _byte_alphabet()
"""How a byte-level tokenizer writes bytes: as one character each."""


def _reach(backend: tokenizers.Tokenizer) -> tuple[int, list[str], int]:
    """What the length of a text tells of its tokens: the characters of the longest one; characters that get none; of
    how many the normaliser may make one. (0, [], 1) where it tells nothing: many kinds of tokenizer drop text.
    """
    config = msgspec.json.decode(backend.to_str(), type=_Config)
    steps, vocabulary = config.steps, backend.get_vocab()
    drops = (
        config.model.type != "BPE"
        or config.truncation
        or (config.normalizer is not None and config.normalizer.type != "NFC")
        or any(token.lstrip or token.rstrip for token in config.added_tokens)
        or not steps
        or steps[-1].type != "ByteLevel"
        or any(step.type not in ("ByteLevel", "Split", "Digits") or step.behavior == "Removed" for step in steps)
    )
    is_unknown_one = config.model.unk_token is not None and not config.model.fuse_unk
    lost = [] if is_unknown_one else [byte for char, byte in BYTES.items() if char not in vocabulary]
    # What is not ASCII has bytes from 0x80 to 0xBF behind its first one: with those known it is never lost as a whole.
    if drops or any(0x80 <= byte < 0xC0 for byte in lost):
        return 0, [], 1
    # Characters are normalised by Unicode's NFC, which makes one of at most four.
    return max(map(len, vocabulary)), [chr(byte) for byte in lost if byte < 0x80], 1 if config.normalizer is None else 4


class _Step(msgspec.Struct):
    """Of a tokenizer.json: a step before the model."""

    type: str
    pretokenizers: "list[_Step]" = []
    pattern: dict[str, Any] = {}
    behavior: str = ""
    invert: bool = False
    use_regex: bool = True
    add_prefix_space: bool = False


class _Added(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _Model(msgspec.Struct):
    type: str = ""
    dropout: float | None = None
    unk_token: str | None = None
    fuse_unk: bool = False


class _Normalizer(msgspec.Struct):
    type: str


class _Config(msgspec.Struct):
    """Of a tokenizer.json: what decides whether `Words` fits, and what a text's length tells."""

    model: _Model
    added_tokens: list[_Added] = []
    normalizer: _Normalizer | None = None
    pre_tokenizer: _Step | None = None
    truncation: Any = None
    padding: Any = None

    @property
    def steps(self) -> list[_Step]:
        """Those before the model, in order."""
        steps = [self.pre_tokenizer] if self.pre_tokenizer is not None else []
        while any(step.type == "Sequence" for step in steps):
            steps = [inner for step in steps for inner in (step.pretokenizers if step.type == "Sequence" else [step])]
        return steps


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return value


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _specials(config: dict[str, Any]) -> dict[str, Any]:
    found = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
    more = config.get("additional_special_tokens")
    return found | ({"additional_special_tokens": [_content(t) for t in more]} if more else {})


def _chat_template(path: Path, config: dict[str, Any], chosen: str | Path | None) -> str:
    if chosen is not None:
        shipped = TEMPLATES / f"{chosen}.jinja"
        file = shipped if shipped.is_file() else Path(chosen)
        if not file.is_file():
            raise FileNotFoundError(f"no chat template at {file}; give a .jinja file or `chatml_tools`")
        return file.read_text("utf-8")
    for file in (path / "chat_template.jinja", path / "chat_template.json"):
        if file.is_file():
            text = file.read_text("utf-8")
            return str(json.loads(text)["chat_template"]) if file.suffix == ".json" else text
    known = config.get("chat_template")
    if isinstance(known, list):
        named = {entry["name"]: entry["template"] for entry in known}
        known = named.get("tool_use") or named.get("default")
    if not isinstance(known, str):
        raise ValueError(f"{path} has no chat template; give one, `chatml_tools` fits models of the ChatML family")
    return known


# ---------------------------------------------------------------- the names that templates expect


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model says; rendering is the same without."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


_DICT_NAMES = frozenset(dir(dict))


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox. `message.role` looks for the key at once where a dict has no attribute of that name."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
