"""From messages to a prompt's token ids, with the parent's tokens kept as they are.

A child's prompt is the parent's path (its prompt and what was sampled) and then the ids of what the template writes
after it: history is never tokenised again. Where the template itself writes history anew (it drops earlier reasoning,
say), or the client did, the prompt follows, as it would in deployment; it shares the tokens that still hold, and says
why. `history="exact"` keeps the parent's tokens instead.

What the template writes after a reply is found by rendering a short stand-in for the history, so a turn costs what is
new in it. That this is allowed is not believed but tried: once for each way in which a template is used (`Ways`), by
rendering small conversations whole and by stand-in; and again at turns 8, 16, 32, ... on the conversation itself.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import msgspec
import numpy as np
from xxhash import xxh3_64_hexdigest

from rollbook.store.events import Edge, Int32s
from rollbook.store.tree import Match, canonical_json, classify, text_of

from . import outside
from .engine import Call, Form
from .errors import BadRequest, ContextOverflow
from .form import CALL_WRITINGS, schema_of
from .parsing import (
    MARKS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    Cut,
    NewParser,
    Parser,
    Scene,
    Vocabulary,
    new_call_id,
    read_text,
)
from .request import Message, Request, Tool
from .tokenizer import Tokenizer

History = Literal["template", "exact"]

_MARK = f"rb{os.urandom(8).hex()}"
"""Stands for a reply while we look for what follows it. No message holds it: it is new in each process."""

_NAME = "\0name\0"

_LONG_HEAD, _HEADS = 500, 64
"""Characters from which on a conversation's head is kept with its ids, and how many are kept."""

_MANY = 32
"""Turns of the one long conversation that a template is tried with."""

_SOME_TOOL: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "d"}}},
        },
    }
]


class Path:
    """Token ids that grow at the end. What grows from another shares its memory, so that a turn costs what it adds."""

    __slots__ = ("_shared", "n")

    def __init__(self, ids: Int32s) -> None:
        self._shared = _Shared(ids, len(ids))
        self.n = len(ids)

    @property
    def ids(self) -> Int32s:
        """int32 [n]; not to be written to."""
        return self._shared.buffer[: self.n]

    def plus(self, more: Int32s, *, kept: int | None = None) -> "Path":
        """The first `kept` ids (all by default), then more."""
        kept = self.n if kept is None else kept
        n = kept + len(more)
        grown = Path.__new__(Path)
        grown.n, grown._shared = n, self._shared
        with self._shared.lock:
            if kept == self.n == self._shared.used and n <= len(self._shared.buffer):
                self._shared.buffer[kept:n] = more
                self._shared.used = n
                return grown
        buffer = np.empty(n + n // 4 + 64, np.int32)
        buffer[:kept] = self._shared.buffer[:kept]
        buffer[kept:n] = more
        grown._shared = _Shared(buffer, n)
        return grown


class _Shared:
    """Memory of paths: the first `used` ids are somebody's and stay as they are."""

    __slots__ = ("buffer", "lock", "used")

    def __init__(self, buffer: Int32s, used: int) -> None:
        self.buffer = buffer
        self.used = used
        self.lock = threading.Lock()


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What a child's prompt needs to know of its parent.

    path_ids: int32, prompt and output; n_prompt of them are the prompt. n_messages: of its request. reply: as it was
    answered. call_names: of the reply's tool calls, (id, name). cut: what a stop string left of the output. thoughts:
    see `thoughts_in`, of its request. depth: interactions on the path, this one included. above: (n_messages, tokens of
    the prompt) of it and of those above it whose prompts begin its prompt, nearest first.
    """

    path_ids: Int32s
    n_prompt: int
    n_messages: int
    reply: Callable[[], Message]
    call_names: tuple[tuple[str, str], ...]
    cut: Cut | None
    thoughts: int
    ways: "Ways"
    depth: int
    above: Callable[[], list[tuple[int, int]]]


class Ways(msgspec.Struct, frozen=True):
    """How a template is used in a conversation. Whether deltas are exact is a question of each way."""

    has_system: bool = False
    has_tools: bool = False
    has_calls: bool = False
    has_reasoning: bool = False
    variables: str = ""


class Check(msgspec.Struct, frozen=True):
    """Whether a turn's prompt is its parent's tokens and something new, and if not, why, in words for people."""

    is_exact: bool
    reasons: tuple[str, ...] = ()


class Rendered(msgspec.Struct, frozen=True):
    """A prompt: the first `kept` tokens of the parent's path, then `more`, int32; and how it hangs there.

    shared: how much of the path the prompt begins with (store/events.py); at least `kept`, and more where the template
    happened to write the same again.
    """

    kept: int
    more: Int32s
    shared: int
    edge: Edge | None
    cause: str | None


class _Tail(msgspec.Struct, frozen=True):
    """What the template writes after a reply's own text: a gap (mostly none), the end of the turn, and the rest."""

    gap: str
    end: str
    after: str


_Plan = tuple[int, Int32s, str | None]
"""How much of the parent's path to keep, the ids that follow, and why it is not all of the path."""


class _Edits(msgspec.Struct, frozen=True):
    """What the client changed in the history: the first message that differs, and why."""

    first: int
    cause: str


class Renderer:
    """One model's template and tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        history: History = "template",
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        variables: dict[str, Any] | None = None,
    ) -> None:
        """tool_parser, reasoning_parser: a name from parsing.py or outside.py, `none`, or `auto`: what template and
        vocabulary show.
        variables: given to the template with every request. Raises ValueError for a name that nobody knows."""
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self.history: History = history
        self._variables = variables or {}
        shown = tokenizer.chat_template
        if tool_parser == "auto":
            places = (shown, tokenizer.added)  # the template knows better than the vocabulary
            tool_parser = next((name for place in places for mark, name in MARKS.items() if mark in place), "json")
        if reasoning_parser == "auto":
            reasoning_parser = "think" if "<think>" in shown or "<think>" in tokenizer.added else "none"
        self.tool_parser = tool_parser
        self._reads_all = tool_parser == "transformers"  # thoughts as well as calls
        if self._reads_all:
            reasoning_parser = "none"
        self._new_tool_parser = outside.tool_parser(tool_parser, tokenizer) or _chosen(
            "tool_parser", tool_parser, {name: _plain_parser(make) for name, make in TOOL_PARSERS.items()}
        )
        self._new_reasoning_parser = outside.reasoning_parser(reasoning_parser, tokenizer) or _chosen(
            "reasoning_parser", reasoning_parser, {name: _thinker(make) for name, make in REASONING_PARSERS.items()}
        )
        self._knows_developer = "developer" in shown
        self._checks: dict[Ways, Check] = {}
        self._heads: dict[str, Int32s] = {}
        self._end = ""  # the text that ends the model's turn, and its id
        self._end_id = -1
        self._find_end()
        self._has_short_ids = not self._takes(new_call_id()) and self._takes("a1b2c3d4e")

    # ------------------------------------------------------------ prompts

    def root(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        variables: dict[str, Any] | None = None,
        *,
        most: int | None = None,
    ) -> Int32s:
        """The prompt of a conversation that continues nothing. Raises BadRequest with the template's words.

        most, here and below: tokens that a prompt and an answer may have together. ContextOverflow is raised where the
        length of the text alone says that there are more, before that text is made tokens, which takes long.
        """
        return self._encode_whole(self._write(self.plain(messages), tools, variables), most)

    def raw(self, prompt: str | list[int], *, most: int | None = None) -> Int32s:
        """A prompt that is no conversation: text, with what the tokenizer puts at its ends, or ids."""
        if isinstance(prompt, str):
            self._refuse_long(prompt, most)
            return np.asarray(self.tokenizer.backend.encode(prompt).ids, np.int32)
        return np.asarray(prompt, np.int32)

    def child(
        self,
        parent: Turn,
        match: Match,
        messages: Callable[[], list[Message]],
        tools: Sequence[Tool] = (),
        variables: dict[str, Any] | None = None,
        *,
        most: int | None = None,
    ) -> Rendered:
        """The prompt of a request that hangs on `parent` by an edge `extends`, `rerendered` or `compacts`.

        messages: the whole conversation as the client tells it, asked for only where the history has to be written
        again; `match.messages[match.n_matched:]` are those after the parent's reply.
        """
        if match.edge != "extends":
            kept, more, cause = 0, self.root(messages(), tools, variables, most=most), None
        else:
            edits = None if self.history == "exact" else self._edits(parent, match)
            tail = self._tail(parent, match, messages, tools, variables) if edits is None else None
            if tail is not None:
                kept, more, cause = self._continue(parent, tail, most)
            else:
                kept, more, cause = self._follow(parent, edits, messages(), tools, variables, most)
        placed = classify(match, parent.path_ids[kept:], more)
        cause = placed.cause if placed.edge == "extends" else cause or placed.cause
        return Rendered(kept, more, kept + placed.shared, placed.edge, cause)

    def ways(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Sequence[Tool],
        variables: dict[str, Any] | None,
        before: Ways | None,
    ) -> Ways:
        """How the template is used once these messages have come. before: how it was used in what they continue."""
        before = before or Ways(has_tools=bool(tools), variables=_spelled(variables))
        system, calls, reasoning = before.has_system, before.has_calls, before.has_reasoning
        for message in messages:
            role = message.get("role")
            system = system or role in _SYSTEM
            calls = calls or bool(message.get("tool_calls"))
            reasoning = reasoning or (role == "assistant" and _thinks(message))
        return Ways(system, bool(tools), calls, reasoning, _spelled(variables))

    def parsers(self, prompt_ids: Int32s, tools: Sequence[Tool]) -> list[Parser]:
        """Fresh parsers for one reply. The prompt's end shows whether the template has opened a thought."""
        is_thinking = self._new_reasoning_parser is not None and self._is_thinking(prompt_ids)
        return self._chain(Scene(is_thinking, tools, partial(self.tokenizer.decode, prompt_ids)))

    def _chain(self, scene: Scene) -> list[Parser]:
        chain: list[Parser] = []
        if self._new_reasoning_parser is not None:
            chain.append(self._new_reasoning_parser(scene))
        if self._new_tool_parser is not None and (scene.tools or self._reads_all):
            chain.append(self._new_tool_parser(scene))
        return chain

    def form(self, prompt_ids: Int32s, request: Request) -> Form | None:
        """What the answer has to be, where the client insists on a call or on JSON. Raises BadRequest where this
        model's calls have no form that is known."""
        choice, answer = request.tool_choice, request.response_format
        tools = [] if choice == "none" else request.tools
        must_call = choice not in ("auto", "none")
        if not must_call and answer is None:
            return None
        if isinstance(choice, dict):
            name = choice["function"]["name"]
            tools = [tool for tool in tools if tool["function"]["name"] == name]
        thought: Literal["none", "may", "open"] = "none"
        if self._new_reasoning_parser is not None:
            thought = "open" if self._is_thinking(prompt_ids) else "may"
        return Form(
            schema=None if must_call or answer is None else schema_of(answer),
            calls=tuple(self._call(tool["function"]) for tool in tools),
            is_single=self.tool_parser != "hermes" or request.template.get("parallel_tool_calls") is False,
            thought=thought,
        )

    def _call(self, function: Mapping[str, Any]) -> Call:
        """A call of this function, as the template writes it."""
        name = msgspec.json.encode(function["name"]).decode()
        begin, end = self._call_writing
        return Call(begin.replace(_NAME, name), function.get("parameters") or {"type": "object"}, end)

    @cached_property
    def _call_writing(self) -> tuple[str, str]:
        """What a call has before its arguments, the name as `_NAME`, and after them."""
        usual = CALL_WRITINGS.get(self.tool_parser.removeprefix("vllm:"))
        call = {"id": "c", "type": "function", "function": {"name": _MARK, "arguments": {_MARK: _MARK}}}
        told: list[Message] = [{"role": "user", "content": "u"}]
        then = self._write(told, _SOME_TOOL, None)
        told.append({"role": "assistant", "content": "", "tool_calls": [call]})
        now = self._write(told, _SOME_TOOL, None)
        first, last = now.find(_MARK, len(then)), now.rfind(_MARK)
        begin = now[len(then) : now.rfind("{", 0, last)].lstrip()
        end = now[now.find("}", last) + 1 :].partition(self._end or "\0")[0].rstrip()
        if (
            now.startswith(then)
            and first < last
            and f'"{_MARK}"' in begin
            and (begin.startswith(usual[0][:8]) if usual else self._new_tool_parser is not None)
        ):
            return begin.replace(f'"{_MARK}"', _NAME), end
        if usual is None:
            raise BadRequest(
                f"tool_choice asks for a call, and how this model writes one ({self.tool_parser}) is not JSON between "
                "fixed marks, which is what an answer can be held to; use auto",
                param="tool_choice",
            )
        return usual

    def _is_thinking(self, prompt_ids: Int32s) -> bool:
        """Whether the template has opened a thought at the prompt's end."""
        return self.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("<think>")

    def check(self, ways: Ways = Ways()) -> Check:  # noqa: B008 - frozen
        """Are deltas exact where the template is used in this way? Tried once, then known."""
        found = self._checks.get(ways)
        if found is None:
            found = self._checks[ways] = self._try(ways)
        return found

    # ------------------------------------------------------------ a turn

    def _tail(
        self,
        parent: Turn,
        match: Match,
        messages: Callable[[], list[Message]],
        tools: Sequence[Tool],
        variables: dict[str, Any] | None,
    ) -> _Tail | None:
        """What follows the parent's reply, by stand-in; None where only the whole conversation can tell."""
        new = match.messages[match.n_matched :]
        ways = self.ways((), tools, variables, parent.ways)
        if self.history == "template" and not self.check(ways).is_exact:
            return None
        names = parent.call_names
        if match.resent is not None and "call ids" in match.rules:
            sent = [str(call.get("id") or "") for call in match.resent.get("tool_calls") or ()]
            names = tuple((i, name) for i, (_, name) in zip(sent, names, strict=False))
        tail = self._stand_in_tail(ways, names, new, tools, variables)
        depth = parent.depth
        if self.history == "template" and tail is not None and depth >= 8 and depth & (depth - 1) == 0:
            told = self.plain(messages())
            told[parent.n_messages] = self._as_answered(parent, told)
            whole, cause = self._compare(told, parent.n_messages, tools, variables)
            if whole is None or (whole.end, whole.after) != (tail.end, tail.after):
                self._checks[ways] = Check(False, (cause or "a long history is written otherwise than a short one",))
                return None
        return tail

    def _continue(self, parent: Turn, tail: _Tail, most: int | None) -> _Plan:
        """The parent's tokens and what follows them, whether or not the reply ended as the template ends it."""
        n = len(parent.path_ids)
        if parent.cut is not None and self.history == "template":
            rest = parent.cut.text + tail.gap + tail.end + tail.after
            return parent.n_prompt + parent.cut.n_tokens, self.encode_after(rest, most), "stop text removed"
        last = int(parent.path_ids[-1]) if n > parent.n_prompt else -1
        if last not in self.tokenizer.eos_ids:
            return n, self.encode_after(tail.gap + tail.end + tail.after, most), None
        if last == self._end_id or self.history == "exact":
            return n, self.encode_after(tail.after, most), None
        return n - 1, self.encode_after(tail.gap + tail.end + tail.after, most), "end of turn replaced"

    def _follow(
        self,
        parent: Turn,
        edits: _Edits | None,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: dict[str, Any] | None,
        most: int | None,
    ) -> _Plan:
        """The prompt as it is written now, from the deepest turn of the parent's path that still begins it."""
        told, at = self.plain(messages), parent.n_messages
        cause: str | None
        if edits is None:
            told[at] = self._as_answered(parent, told)
            tail, cause = self._compare(told, at, tools, variables)
            if tail is not None:
                return self._continue(parent, tail, most)
        else:
            cause = edits.cause
        now = self._write(told, tools, variables)
        for n_messages, n_prompt in parent.above():
            if edits is not None and n_messages > edits.first:
                continue
            then = self._write(told[:n_messages], tools, variables)
            if now.startswith(then):
                rest = now[len(then) :]
                more = self._reply_anew(parent, rest, most) if n_messages == at else self.encode_after(rest, most)
                return n_prompt, more, cause
        return 0, self._encode(now, most), cause

    def _as_answered(self, parent: Turn, told: list[Message]) -> Message:
        """The parent's reply, which says what came back in `told`, in our spelling; the calls' ids are the client's."""
        reply = self._plain(parent.reply())
        for ours, theirs in zip(
            reply.get("tool_calls", ()), told[parent.n_messages].get("tool_calls", ()), strict=False
        ):
            ours["id"] = theirs["id"]
        return reply

    def _reply_anew(self, parent: Turn, rest: str, most: int | None) -> Int32s:
        """The reply as it is written now and what follows it: with the sampled tokens where they spell its end."""
        pieces, output_ids = self.vocabulary.pieces, parent.path_ids[parent.n_prompt :]
        end = rest.find(self._end) if self._end else -1
        if pieces is not None and end >= 0 and len(output_ids) and output_ids[-1] == self._end_id:
            output = output_ids.tolist()
            wanted = rest[: end + len(self._end)].encode("utf-8", "surrogatepass")
            at, n = len(output), 0
            while at and n < len(wanted):
                at -= 1
                n += len(pieces[output[at]])
            if n == len(wanted) and b"".join(pieces[i] for i in output[at:]) == wanted:
                return np.concatenate((output_ids[at:], self.encode_after(rest[end + len(self._end) :], most)))
        return self.encode_after(rest, most)

    def _edits(self, parent: Turn, match: Match) -> _Edits | None:
        """What the client left out of the history, or put into it, that changes what the model reads."""
        told = match.messages
        if parent.ways.has_reasoning and match.n_matched > parent.n_messages:
            changed, bit = parent.thoughts ^ thoughts_in(told[: parent.n_messages]), 0
            for n, message in enumerate(told[: parent.n_messages] if changed else ()):
                if message.get("role") == "assistant":
                    if changed >> bit & 1:
                        return _Edits(n, "reasoning removed" if parent.thoughts >> bit & 1 else "reasoning added")
                    bit += 1
        if "reasoning" in match.rules:
            gone = match.resent is not None and not _thinks(match.resent)
            return _Edits(parent.n_messages, "reasoning removed" if gone else "reasoning changed")
        if "text" in match.rules:
            gone = match.resent is not None and not text_of(match.resent).strip()
            return _Edits(parent.n_messages, "text removed" if gone else "history edited")
        return None

    # ------------------------------------------------------------ what the template writes

    def plain(self, messages: Iterable[Mapping[str, Any]]) -> list[Message]:
        """Messages as templates expect them: text as a string, arguments as objects, reasoning in one place."""
        return [self._plain(message) for message in messages]

    def _plain(self, message: Mapping[str, Any]) -> Message:
        role = message.get("role")
        if role == "developer" and not self._knows_developer:
            role = "system"
        content = message.get("content")
        said: Message = {"role": role, "content": content if isinstance(content, str) else _text(content)}
        if role == "assistant":
            if calls := message.get("tool_calls"):
                said["tool_calls"] = [_plain_call(call, self._call_id) for call in calls]
            if reasoning := _reasoning(message):
                said["reasoning_content"] = reasoning
        if message.get("name"):
            said["name"] = message["name"]
        if message.get("tool_call_id"):
            said["tool_call_id"] = self._call_id(message["tool_call_id"])
        return said

    def _call_id(self, call_id: str) -> str:
        """A call's id as the template takes it."""
        return xxh3_64_hexdigest(call_id.encode("utf-8", "surrogatepass"))[:9] if self._has_short_ids else call_id

    def _write(self, told: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any] | None) -> str:
        return self.tokenizer.render(
            told, list(tools), add_generation_prompt=True, **{**self._variables, **(variables or {})}
        )

    def _refuse_long(self, text: str, most: int | None) -> None:
        if most is not None and (least := self.tokenizer.least(text)) >= most:
            raise ContextOverflow.of(least, most, is_least=True)

    def _encode(self, text: str, most: int | None) -> Int32s:
        self._refuse_long(text, most)
        return self.tokenizer.encode(text)

    def _encode_whole(self, text: str, most: int | None) -> Int32s:
        """The ids of a whole conversation. Its head, system prompt and tools, is the same for many: encoded once."""
        self._refuse_long(text, most)
        head = text[: text.find(self._end) + len(self._end)] if self._end and len(text) >= _LONG_HEAD else ""
        if len(head) < _LONG_HEAD:
            return self.tokenizer.encode(text)
        known = self._heads.get(head)
        if known is not None:
            return np.concatenate((known, self.encode_after(text[len(head) :])))
        ids, head_ids = self.tokenizer.encode(text), self.tokenizer.encode(head)
        if np.array_equal(ids, np.concatenate((head_ids, self.encode_after(text[len(head) :])))):
            if len(self._heads) >= _HEADS:
                del self._heads[next(iter(self._heads))]
            self._heads[head] = head_ids
        return ids

    def encode_after(self, text: str, most: int | None = None) -> Int32s:
        """The ids of text that stands behind other tokens, not at the beginning."""
        if not self._end:
            return self._encode(text, most)
        self._refuse_long(text, most)
        ids = self.tokenizer.encode(self._end + text)
        return ids[int((ids == self._end_id).argmax()) + 1 :]

    def _stand_in_tail(
        self,
        ways: Ways,
        call_names: tuple[tuple[str, str], ...],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        variables: dict[str, Any] | None,
    ) -> _Tail | None:
        head = [{"role": "system", "content": "s"}] if ways.has_system else []
        names = tuple((self._call_id(i), name) for i, name in call_names)
        told = [*head, {"role": "user", "content": "u"}, _stand_in(names), *self.plain(new)]
        return self._tail_in(self._write(told, _SOME_TOOL if tools else (), variables), has_calls=bool(call_names))

    def _tail_in(self, text: str, *, has_calls: bool) -> _Tail | None:
        """What follows the stand-in in a rendered conversation."""
        at = text.rfind(_MARK)
        if at < 0:
            return None
        rest = text[at + len(_MARK) :]
        end = rest.find(self._end) if self._end else -1
        if end < 0:
            return None if has_calls else _Tail("", "", rest)
        return _Tail("" if has_calls else rest[:end], self._end, rest[end + len(self._end) :])

    def _compare(
        self, told: list[Message], at: int, tools: Sequence[Tool], variables: dict[str, Any] | None
    ) -> tuple[_Tail | None, str | None]:
        """Does what was written before the reply `told[at]`, and the reply itself, still stand in the conversation?

        Returns what follows the reply; or None and why not.
        """
        now, then = self._write(told, tools, variables), self._write(told[:at], tools, variables)
        thoughts = [m["reasoning_content"] for m in told[: at + 1] if "reasoning_content" in m]
        rewritten = "history rewritten by template"
        if any(thought not in now for thought in thoughts):
            rewritten = "reasoning removed by template"
        if not now.startswith(then):
            return None, rewritten
        names = tuple((c.get("id", ""), c["function"]["name"]) for c in told[at].get("tool_calls") or ())
        marked = self._write([*told[:at], _stand_in(names), *told[at + 1 :]], tools, variables)
        tail = self._tail_in(marked, has_calls=bool(names))
        if tail is None or not now.endswith(tail.end + tail.after):
            return None, rewritten
        written = now[len(then) : len(now) - len(tail.end + tail.after)]
        scene = Scene(then.rstrip().endswith("<think>"), tools or _SOME_TOOL, partial(str, then))
        content, reasoning, calls = read_text(written, self._chain(scene))
        reply = told[at]
        if (reasoning or "").strip() != reply.get("reasoning_content", "").strip():
            return None, rewritten
        ours = [
            (c["function"]["name"], canonical_json(c["function"]["arguments"])) for c in reply.get("tool_calls", ())
        ]
        if ours != [(call.name, canonical_json(call.arguments)) for call in calls]:
            return None, "tool calls rewritten by template"
        if (content or "").strip() != reply["content"].strip():
            return None, rewritten
        return tail, None

    # ------------------------------------------------------------ trying the template

    def _takes(self, call_id: str) -> bool:
        """Whether the template takes tool calls with such an id. Mistral's want nine letters or digits."""
        told = [{"role": "user", "content": "u"}, _stand_in(((call_id, "f"),))]
        told += [{"role": "tool", "tool_call_id": call_id, "name": "f", "content": "r"}]
        try:
            self._write(told, _SOME_TOOL, None)
        except BadRequest:
            return False
        return True

    def _find_end(self) -> None:
        told = [{"role": "user", "content": "u"}, _stand_in(()), {"role": "user", "content": "v"}]
        try:
            rest = self._write(told, (), None).partition(_MARK)[2]
        except BadRequest:
            return
        found = [
            (place, text, i)
            for i in self.tokenizer.eos_ids
            if (text := self.tokenizer.decode([i])) and (place := rest.find(text)) >= 0
        ]
        if found:
            _, end, end_id = min(found)
            if self.tokenizer.encode(end).tolist()[-1:] == [end_id]:
                self._end, self._end_id = end, end_id

    def _try(self, ways: Ways) -> Check:
        variables = msgspec.json.decode(ways.variables) if ways.variables else None
        tools = _SOME_TOOL if ways.has_tools else []
        reasons: dict[str, None] = {}
        n_tried = 0
        for conversation in _conversations(ways):
            told = self.plain(conversation)
            turns = [n for n, m in enumerate(told) if m["role"] == "assistant"]
            both = [*zip(turns, [*turns[1:], len(told)], strict=True)]
            for at, until in both if len(both) < _MANY else both[-1:]:
                try:
                    whole, cause = self._compare(told[:until], at, tools, variables)
                    names = tuple((c["id"], c["function"]["name"]) for c in conversation[at].get("tool_calls", ()))
                    short = self._stand_in_tail(ways, names, conversation[at + 1 : until], tools, variables)
                except BadRequest as error:
                    reasons[error.message] = None
                    continue
                n_tried += 1
                if whole is None:
                    reasons[cause or "history rewritten by template"] = None
                elif short != whole:
                    reasons["what is new is written otherwise after a longer history"] = None
                elif not self._end:
                    reasons["the template does not end the model's turns with an end-of-turn token"] = None
        return Check(not reasons and n_tried > 0, tuple(reasons))


# ---------------------------------------------------------------- messages

_SYSTEM = frozenset({"system", "developer"})
_NOT_TEXT = ("image", "audio", "video", "file", "document")


def _text(content: Any) -> str:
    if content is None:
        return ""
    for part in content if isinstance(content, list) else ():
        kind = str(part.get("type") or "") if isinstance(part, dict) else ""
        if any(word in kind for word in _NOT_TEXT):
            raise BadRequest(f"a message has a part of type {kind!r}, but this model reads text only", param="messages")
    return text_of({"content": content})


def _reasoning(message: Mapping[str, Any]) -> str:
    """The thought that a message carries apart from its text."""
    said = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(said, str):
        return said
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return "".join(str(p.get("thinking") or "") for p in parts if isinstance(p, dict) and p.get("type") == "thinking")


def _thinks(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return bool(_reasoning(message)) or (isinstance(content, str) and "</think>" in content)


def thoughts_in(messages: Iterable[Mapping[str, Any]]) -> int:
    """One bit for each assistant message, the first lowest: does it bring its reasoning?"""
    bits, bit = 0, 1
    for message in messages:
        if message.get("role") == "assistant":
            if _thinks(message):
                bits |= bit
            bit <<= 1
    return bits


def _plain_call(call: dict[str, Any], call_id: Callable[[str], str]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments or "{}")
        except msgspec.DecodeError:
            value = arguments
        arguments = value if isinstance(value, dict) else arguments
    return {
        "id": call_id(str(call.get("id") or "")),
        "type": "function",
        "function": {"name": function.get("name") or "", "arguments": {} if arguments is None else arguments},
    }


def _stand_in(call_names: tuple[tuple[str, str], ...]) -> Message:
    said: Message = {"role": "assistant", "content": _MARK}
    if call_names:
        said["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": {_MARK: _MARK}}}
            for i, name in call_names
        ]
    return said


def _spelled(variables: dict[str, Any] | None) -> str:
    return msgspec.json.encode(variables, order="sorted").decode() if variables else ""


def _plain_parser(make: Callable[[], Parser]) -> NewParser:
    return lambda scene: make()


def _thinker(make: Callable[..., Parser]) -> NewParser:
    return lambda scene: make(is_open=scene.is_thinking)


def _chosen(setting: str, name: str, known: dict[str, NewParser]) -> NewParser | None:
    if name == "none":
        return None
    if name not in known:
        raise ValueError(
            f"{setting} is {name!r}, but the ones there are: {', '.join(sorted(known))}, none, auto, vllm:NAME"
            f"{', transformers' if setting == 'tool_parser' else ''}"
        )
    return known[name]


def _call(n: int) -> dict[str, Any]:
    return {"id": f"call0000{n}", "type": "function", "function": {"name": "f", "arguments": {"x": f"a{n}"}}}


def _conversations(ways: Ways) -> list[list[Message]]:
    """Conversations that use a template in these ways."""

    def reply(n: int, calls: Sequence[int] = ()) -> Message:
        said: Message = {"role": "assistant", "content": "" if calls else f"reply {n}"}
        if ways.has_reasoning:
            said["reasoning_content"] = f"thought {n}"
        if calls:
            said["tool_calls"] = [_call(c) for c in calls]
        return said

    def user(n: int) -> Message:
        return {"role": "user", "content": f"question {n}"}

    def result(n: int) -> Message:
        return {"role": "tool", "tool_call_id": f"call0000{n}", "name": "f", "content": f"result {n}"}

    head: list[Message] = [{"role": "system", "content": "be good"}] if ways.has_system else []
    talks = [
        [user(1), reply(1), user(2), reply(2), user(3), reply(3), user(4)],
        [m for n in range(_MANY) for m in (user(n), reply(n))] + [user(_MANY)],
    ]
    if ways.has_calls:
        talks.append(
            [
                user(1),
                reply(1, [1]),
                result(1),
                reply(2, [2, 3]),
                result(2),
                result(3),
                reply(4),
                user(5),
                reply(5),
                user(6),
            ]
        )
    return [[*head, *talk] for talk in talks]
