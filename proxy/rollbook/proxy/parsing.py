"""From sampled tokens to what a client reads: text, reasoning and tool calls, as they come.

A `Reader` turns the tokens of one reply into pieces. It never shows half a character nor anything that a later token
takes back, ends at stop strings wherever they lie across tokens, and reads the same whether the tokens came one by one
or all at once. What a parser does not understand stays text, to the letter. Tokens are never changed here: how many of
them count is `n_taken`, and what a stop string cut off is `cut`.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from rollbook.store.events import Float32s, Int32s, new_event_id

from .request import Piece, Tool, ToolCall
from .tokenizer import BYTES, Tokenizer


class Text(msgspec.Struct, frozen=True):
    """Said to the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Thought, not said."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """A tool call has its name."""

    name: str


class Arguments(msgspec.Struct, frozen=True):
    """More of the arguments of the latest call, the model's own text."""

    text: str


Segment = Text | Reasoning | CallBegun | Arguments


class Scene(msgspec.Struct, frozen=True):
    """What a reply answers, for parsers that want to know. is_thinking: the prompt has begun a thought."""

    is_thinking: bool = False
    tools: Sequence[Tool] = ()
    prompt: Callable[[], str] = str


class Parser(Protocol):
    """Reads a reply's text piece by piece; what it returns does not depend on where the pieces were cut."""

    markers: tuple[str, ...]
    """Special tokens whose text the parser needs to see."""

    @property
    def wakes_at(self) -> str | None:
        """Text without this character now goes through as it is; "": any text does; None: none does."""
        ...

    def feed(self, text: str) -> list[Segment]:
        """What is now certain."""
        ...

    def end(self) -> list[Segment]:
        """What was held back, now that nothing follows."""
        ...


NewParser = Callable[[Scene], Parser]
"""Makes one for each reply."""


def _held(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for n in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:n]):
            return n
    return 0


# ---------------------------------------------------------------- reasoning


class ThinkParser:
    """`<think> ... </think>` at the beginning of a reply. Line breaks around the thought belong to neither side."""

    markers: tuple[str, ...] = ("<think>", "</think>")

    def __init__(self, *, is_open: bool = False) -> None:
        """is_open: the prompt has opened the thought already."""
        self._state = "open" if is_open else "start"
        self._buffer = ""

    @property
    def wakes_at(self) -> str | None:
        return "" if self._state == "said" else None

    def feed(self, text: str) -> list[Segment]:
        self._buffer += text
        found: list[Segment] = []
        if self._state in ("start", "open"):
            seen = self._buffer.lstrip()
            if seen.startswith("<think>"):
                self._state, self._buffer = "thinking", seen[len("<think>") :].lstrip("\n")
                if not self._buffer:
                    self._state = "thinking, empty"
            elif "<think>".startswith(seen):
                return []
            else:
                self._state = "said" if self._state == "start" else "thinking, empty"
        if self._state == "thinking, empty":
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer:
                self._state = "thinking"
        if self._state == "thinking":
            thought, mark, rest = self._buffer.partition("</think>")
            if mark:
                if thought := thought.rstrip("\n"):
                    found.append(Reasoning(thought))
                self._state, self._buffer = "said, empty", rest
            else:
                sure = thought[: len(thought) - _held(thought, "</think>")].rstrip("\n")
                if sure:
                    found.append(Reasoning(sure))
                    self._buffer = self._buffer[len(sure) :]
        if self._state == "said, empty":
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer:
                self._state = "said"
        if self._state == "said" and self._buffer:
            found.append(Text(self._buffer))
            self._buffer = ""
        return found

    def end(self) -> list[Segment]:
        rest, self._buffer = self._buffer, ""
        if self._state in ("thinking", "thinking, empty", "open"):
            rest = rest.rstrip("\n")
            return [Reasoning(rest)] if rest else []
        return [Text(rest)] if rest and self._state == "start" else []


REASONING_PARSERS: dict[str, Callable[..., Parser]] = {"think": ThinkParser}
"""By name, for settings. Called with is_open=."""


# ---------------------------------------------------------------- tool calls


class _Call(msgspec.Struct):
    """A call as models write it; arguments keep their own spelling."""

    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def segments(self) -> list[Segment]:
        raw = self.arguments if self.arguments is not msgspec.UNSET else self.parameters
        return [CallBegun(self.name), Arguments("{}" if raw is msgspec.UNSET else _plain(bytes(raw).decode()))]


def _plain(raw: str) -> str:
    """Arguments that were written as a JSON string are the text in it."""
    if raw.startswith('"'):
        try:
            return msgspec.json.decode(raw, type=str)
        except msgspec.DecodeError:
            return raw
    return raw


_decode_call = msgspec.json.Decoder(_Call).decode
_decode_calls = msgspec.json.Decoder(list[_Call]).decode
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[^\s])')
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class _Value:
    """Finds where a JSON object or list ends, without asking whether it is good JSON."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = -1  # place of a character that a backslash before it makes plain

    def end_in(self, text: str, begin: int) -> int | None:
        """The index after the value's last character, looking from `begin` on."""
        for found in _STRUCTURE.finditer(text, begin):
            at, mark = found.start(), found.group()
            if at == self._escaped:
                continue
            if self._in_string:
                if mark == "\\":
                    self._escaped = at + 1
                elif mark == '"':
                    self._in_string = False
            elif mark == '"':
                self._in_string = True
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text around.

    Arguments stream as they come. A block without a name is text.
    """

    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def __init__(self) -> None:
        self._state = "text"
        self._buffer = ""
        self._value = _Value()
        self._seen = 0  # characters of the arguments that `_value` has read

    @property
    def wakes_at(self) -> str | None:
        return "<" if self._state == "text" and not self._buffer else None

    def feed(self, text: str) -> list[Segment]:
        self._buffer += text
        found: list[Segment] = []
        while True:
            before = (self._state, len(self._buffer))
            getattr(self, f"_{self._state}")(found)
            if (self._state, len(self._buffer)) == before:
                return found

    def _text(self, found: list[Segment]) -> None:
        said, mark, rest = self._buffer.partition("<tool_call>")
        if mark:
            self._state, self._buffer = "head", rest
        else:
            held = _held(said, "<tool_call>")
            said, self._buffer = said[: len(said) - held], said[len(said) - held :]
        if said:
            found.append(Text(said))

    def _head(self, found: list[Segment]) -> None:
        block, mark, rest = self._buffer.partition("</tool_call>")
        head = _HEAD.match(block)
        if head and block[head.end()] in "{[":
            try:
                found.append(CallBegun(msgspec.json.decode(head.group(1), type=str)))
            except msgspec.DecodeError:
                head = None
            else:
                self._state, self._buffer = "arguments", self._buffer[head.end() :]
                self._value, self._seen = _Value(), 0
                return
        if mark:
            found.extend(_block(block))
            self._state, self._buffer = "text", rest

    def _arguments(self, found: list[Segment]) -> None:
        body, mark, _ = self._buffer.partition("</tool_call>")
        sure = len(body) if mark else len(body) - _held(body, "</tool_call>")
        end = self._value.end_in(body[:sure], self._seen)
        given = sure if end is None else end
        if given:
            found.append(Arguments(body[:given]))
        self._buffer = self._buffer[given:]
        if self._value._escaped >= 0:
            self._value._escaped -= given
        self._seen = 0
        if end is not None:
            self._state = "tail"
        elif mark:
            self._state, self._buffer = "text", self._buffer[len("</tool_call>") :]

    def _tail(self, found: list[Segment]) -> None:
        """After the arguments: the call's own closing brace, and whatever else is in the block, says nothing."""
        _, mark, rest = self._buffer.partition("</tool_call>")
        if mark:
            self._state, self._buffer = "text", rest

    def end(self) -> list[Segment]:
        rest, self._buffer = self._buffer, ""
        if self._state == "head":
            return _block(rest, end="")
        if self._state == "arguments":
            return [Arguments(rest)] if rest else []
        return [Text(rest)] if rest and self._state == "text" else []


def _block(block: str, *, end: str = "</tool_call>") -> list[Segment]:
    try:
        return _decode_call(block).segments()
    except (msgspec.DecodeError, UnicodeError):
        return [Text(f"<tool_call>{block}{end}")]


class JsonParser:
    """A reply that is nothing but `{"name": ..., "arguments": {...}}`, or a list of such. Known at its end only."""

    markers: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._buffer = ""
        self._is_text = False

    @property
    def wakes_at(self) -> str | None:
        return "" if self._is_text else None

    def feed(self, text: str) -> list[Segment]:
        if self._is_text:
            return [Text(text)] if text else []
        self._buffer += text
        seen = self._buffer.lstrip()
        if not seen or seen[0] in "{[" or any(m.startswith(seen) or seen.startswith(m) for m in self.markers):
            return []
        self._is_text = True
        return [Text(self._buffer)]

    def end(self) -> list[Segment]:
        if self._is_text or not self._buffer:
            return []
        text = self._buffer.strip()
        for mark in self.markers:
            text = text.removeprefix(mark)
        return _read_calls(text) or [Text(self._buffer)]


class LlamaParser(JsonParser):
    """Llama 3: as `JsonParser`, after a `<|python_tag|>` or without; several calls have `;` between them."""

    markers: tuple[str, ...] = ("<|python_tag|>",)


class MistralParser:
    """Text, then `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` once or more."""

    markers: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]")

    def __init__(self) -> None:
        self._buffer = ""
        self._is_text = True

    @property
    def wakes_at(self) -> str | None:
        return "[" if self._is_text and not self._buffer else None

    def feed(self, text: str) -> list[Segment]:
        self._buffer += text
        if not self._is_text:
            return []
        said, mark, rest = self._buffer.partition("[TOOL_CALLS]")
        if mark:
            self._is_text, self._buffer = False, rest
        else:
            held = _held(said, "[TOOL_CALLS]")
            said, self._buffer = said[: len(said) - held], said[len(said) - held :]
        return [Text(said)] if said else []

    def end(self) -> list[Segment]:
        rest, self._buffer = self._buffer, ""
        if self._is_text:
            return [Text(rest)] if rest else []
        if "[ARGS]" not in rest:
            return _read_calls(rest) or [Text(f"[TOOL_CALLS]{rest}")]
        found: list[Segment] = []
        for call in rest.split("[TOOL_CALLS]"):
            name, _, arguments = call.partition("[ARGS]")
            found += [CallBegun(name.strip()), Arguments(arguments.strip() or "{}")]
        return found


def _read_calls(text: str) -> list[Segment]:
    """Calls written as one JSON object, a list of them, or several with `;` between; [] for anything else."""
    text = text.strip()
    try:
        calls = _decode_calls(text) if text.startswith("[") else [_decode_call(text)]
    except (msgspec.DecodeError, UnicodeError):
        parts = re.split(r"(?<=\})\s*;\s*(?=\{)", text)
        if len(parts) == 1:
            return []
        calls = []
        for part in parts:
            try:
                calls.append(_decode_call(part))
            except (msgspec.DecodeError, UnicodeError):
                return []
    return [segment for call in calls for segment in call.segments()]


TOOL_PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesParser,
    "json": JsonParser,
    "llama": LlamaParser,
    "mistral": MistralParser,
}
"""By name, for settings."""

MARKS = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama"}
"""What shows in a template or vocabulary which parser a model needs."""


# ---------------------------------------------------------------- tokens to text


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([BYTES[c] for c in token])
    except KeyError:
        return token.encode()


class Vocabulary:
    """How ids read, for one tokenizer. Shared by all readers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.pieces: list[bytes] | None = None
        self._shown: dict[frozenset[int], list[bytes]] = {}  # few: one for each set of stop ids and parsers
        if type(tokenizer.backend.decoder).__name__ == "ByteLevel":
            self.pieces = [b""] * (max(tokenizer.backend.get_vocab().values()) + 1)
            for token, i in tokenizer.backend.get_vocab().items():
                self.pieces[i] = _bytes_of(token)

    def hidden(self, markers: Sequence[str], stop_ids: Sequence[int]) -> frozenset[int]:
        """Ids that have no text for a reader: special tokens, but for those that a parser needs to see."""
        shown = {self.tokenizer.added[m] for m in markers if m in self.tokenizer.added}
        return frozenset((self.tokenizer.special_ids | set(stop_ids)) - shown)

    def stream(self, hidden: frozenset[int] = frozenset()) -> "_ByteText | _AnyText":
        """A fresh decoder for one reply, to which the hidden ids say nothing."""
        if self.pieces is None:
            return _AnyText(self.tokenizer, hidden)
        shown = self._shown.get(hidden)
        if shown is None:
            shown = self._shown[hidden] = [b"" if i in hidden else piece for i, piece in enumerate(self.pieces)]
        return _ByteText(shown)


class _ByteText:
    """Tokens are bytes; only UTF-8 needs care."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        try:
            data = b"".join(map(self._pieces.__getitem__, ids))
        except IndexError:  # a model may have more rows than the tokenizer has tokens
            data = b"".join([self._pieces[i] for i in ids if i < len(self._pieces)])
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    @property
    def is_between_characters(self) -> bool:
        return not self._decoder.getstate()[0]


class _AnyText:
    """Any other tokenizer: what a token adds depends on those before it, so a few are decoded again."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._decode = tokenizer.decode
        self._hidden = hidden
        self._ids: list[int] = []
        self._old = 0  # ids before this one have been shown
        self.is_between_characters = True

    def push(self, ids: Sequence[int]) -> str:
        said = ""
        for i in ids:
            if i in self._hidden:
                continue
            self._ids.append(i)
            before, now = self._decode(self._ids[: self._old]), self._decode(self._ids)
            self.is_between_characters = not now.endswith("\ufffd")
            if self.is_between_characters:
                said += now[len(before) :]
                # What was just shown begins at a character, so it is context enough; a fixed number of ids may not be.
                self._ids = self._ids[self._old :]
                self._old = len(self._ids)
        return said

    def finish(self) -> str:
        rest = self._decode(self._ids)[len(self._decode(self._ids[: self._old])) :]
        self._ids, self._old = [], 0
        return rest


# ---------------------------------------------------------------- a reply


def new_call_id() -> str:
    """A tool call's id that no other answer has, so that what comes back says which answer it belongs to."""
    return f"call_{new_event_id().hex()}"


class Cut(msgspec.Struct, frozen=True):
    """What a stop string left standing: the first `n_tokens` tokens, and `text` of the next one."""

    n_tokens: int
    text: str


class Reader:
    """One reply on its way. See the module."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        parsers: Sequence[Parser] = (),
        keep_tokens: bool = False,
    ) -> None:
        """parsers: each reads what the one before it left as text. keep_tokens: pieces carry ids and logprobs."""
        self._parsers = parsers
        self._stream = vocabulary.stream(vocabulary.hidden([m for p in parsers for m in p.markers], stop_ids))
        self._stop = tuple(s for s in stop if s)
        self._keep_tokens = keep_tokens
        self._unsure = ""  # text that may be the beginning of a stop string
        self._n_sure = 0  # characters before it
        self._ends: list[tuple[int, int]] = [(0, 0)]  # (tokens, characters): the latest places between tokens
        self._recent = ""  # the characters from the first of those places to `_n_sure`
        self._blank = ""  # white space that is dropped if a tool call follows
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self._after_call = True  # white space here is not content yet
        self._wakes_at: str | None = None  # text without these characters needs no parser; None: all text does
        self.n_taken = 0  # tokens that count
        self.is_stopped = False  # a stop string was found: nothing further counts
        self.cut: Cut | None = None

    def push(self, ids: Int32s, logprobs: Float32s) -> list[Piece]:
        """Take tokens: int32 [n], float32 [n]. After a stop string, `n_taken` says how many of them counted."""
        plain = ids.tolist()
        if not self._stop:
            n = len(plain)
            text = self._stream.push(plain)
            if self._wakes_at is not None and text and not any(c in text for c in self._wakes_at):
                self.n_taken += n
                self._content.append(text)
                if not self._keep_tokens:
                    return [Piece(text=text)]
                self._ids += plain
                self._logprobs += logprobs.tolist()
                return [self._piece(text=text)]
            segments = self._parse(text)
        else:
            segments, n = [], 0
            for token in plain:
                n += 1
                segments += self._parse(self._until_stop(self._stream.push([token]), self.n_taken + n))
                if self.is_stopped:
                    break
        self.n_taken += n
        if self._keep_tokens:
            self._ids += plain[:n]
            self._logprobs += logprobs[:n].tolist()
        pieces = self._pieces(segments)
        wakes = None if self._after_call or self._blank else [p.wakes_at for p in self._parsers]
        self._wakes_at = None if wakes is None or None in wakes else "".join(w for w in wakes if w)
        return pieces

    def push_text(self, text: str) -> list[Piece]:
        """Take text that never was tokens."""
        return self._pieces(self._parse(text))

    def finish(self) -> list[Piece]:
        """What was held back, once the engine has ended."""
        segments: list[Segment] = []
        if not self.is_stopped:
            rest = self._stream.finish()
            if self._stop:
                rest = self._until_stop(rest, self.n_taken, is_last=True)
            segments = self._parse(rest)
        for n, parser in enumerate(self._parsers):
            for segment in parser.end():
                segments += self._through(segment, n + 1)
        pieces = self._pieces(segments)
        if self._blank and not self._calls:
            self._content.append(self._blank)
            pieces.append(self._piece(text=self._blank))
        self._blank = ""
        if self._ids:
            pieces.append(self._piece())
        return pieces

    @property
    def content(self) -> str | None:
        """The text so far; None where there are only tool calls."""
        text = "".join(self._content)
        return text if text or not self._calls else None

    @property
    def reasoning(self) -> str | None:
        return "".join(self._reasoning) or None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(id=i, name=name, arguments="".join(text)) for i, name, text in self._calls)

    def _until_stop(self, text: str, n_tokens: int, *, is_last: bool = False) -> str:
        """The text that surely comes before any stop string. What may begin one is held in `_unsure`."""
        self._unsure += text
        begin = self._n_sure
        places = [p for s in self._stop if (p := self._unsure.find(s)) >= 0] if text else []
        if places:
            self.is_stopped = True
            sure = min(places)
            tokens, end = next((t, c) for t, c in reversed(self._ends) if c <= begin + sure)
            self.cut = Cut(
                tokens, (self._recent + self._unsure)[end - begin + len(self._recent) :][: begin + sure - end]
            )
        else:
            sure = len(self._unsure) - (0 if is_last else max(_held(self._unsure, s) for s in self._stop))
            if self._stream.is_between_characters:
                self._ends.append((n_tokens, begin + len(self._unsure)))
        said, self._unsure = self._unsure[:sure], self._unsure[sure:]
        self._n_sure += sure
        known = next((i for i in range(len(self._ends) - 1, 0, -1) if self._ends[i][1] <= self._n_sure), 0)
        del self._ends[:known]
        self._recent = (
            (self._recent + said)[self._ends[0][1] - self._n_sure :] if self._ends[0][1] < self._n_sure else ""
        )
        return said

    def _parse(self, text: str) -> list[Segment]:
        return self._through(Text(text), 0) if text else []

    def _through(self, segment: Segment, n: int) -> list[Segment]:
        """A segment through the parsers from the n-th on."""
        if not isinstance(segment, Text) or n == len(self._parsers):
            return [segment]
        return [out for inner in self._parsers[n].feed(segment.text) for out in self._through(inner, n + 1)]

    def _pieces(self, segments: list[Segment]) -> list[Piece]:
        pieces: list[Piece] = []
        for segment in segments:
            if isinstance(segment, Text):
                text = self._blank + segment.text
                if self._after_call and not text.strip():
                    self._blank = text
                    continue
                self._blank, self._after_call = "", False
                self._content.append(text)
                pieces.append(self._piece(text=text))
            elif isinstance(segment, Reasoning):
                self._reasoning.append(segment.text)
                pieces.append(self._piece(reasoning=segment.text))
            elif isinstance(segment, CallBegun):
                self._blank, self._after_call = "", True
                self._calls.append((new_call_id(), segment.name, []))
                at = len(self._calls) - 1
                pieces.append(self._piece(tool_index=at, tool_id=self._calls[at][0], tool_name=segment.name))
            else:
                at = len(self._calls) - 1
                self._calls[at][2].append(segment.text)
                pieces.append(self._piece(tool_index=at, tool_arguments=segment.text))
        return pieces

    def _piece(self, **what: Any) -> Piece:
        piece = Piece(token_ids=self._ids, logprobs=self._logprobs, **what)
        self._ids, self._logprobs = [], []
        return piece


def read_text(text: str, parsers: Sequence[Parser]) -> tuple[str | None, str | None, tuple[ToolCall, ...]]:
    """(content, reasoning, tool calls) of a reply's whole text."""
    reader = Reader(_NO_VOCABULARY, parsers=parsers)
    reader.push_text(text)
    reader.finish()
    return reader.content, reader.reasoning, reader.tool_calls


class _NoVocabulary(Vocabulary):
    """For text that never was tokens."""

    def __init__(self) -> None:
        self.pieces = []
        self._shown = {}

    def hidden(self, markers: Sequence[str], stop_ids: Sequence[int]) -> frozenset[int]:
        return frozenset()


_NO_VOCABULARY = _NoVocabulary()
