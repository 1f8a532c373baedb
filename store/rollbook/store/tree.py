"""Which node of an episode's conversation tree does a request continue?

A message is reduced to what it says (`Rules`: null = absent = "", parts joined, provider fields dropped, tool
arguments as canonical JSON, reasoning and text ends left out). A request is a chain of hashes, one per message
prefix, that starts from the tool list; its parent is the node whose request plus reply hashes to the longest
such prefix. Every node is found by one dict lookup, however many there are; what an earlier request already
said is compared in C, not hashed again.

Messages decide who the parent is. Whether the tokens agree is decided by `classify`, from the token ids.
Nothing here reads a log or knows of events' envelopes, except `TreeIndex.from_events`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from .events import Edge, Event, InteractionRecorded, decode_messages

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
Ints = npt.NDArray[np.integer[Any]]

LOSSY = frozenset({"reasoning", "arguments", "numbers", "whitespace", "call ids", "text", "system line"})
"""Rules after which the client's history is no longer, to the letter, what the model said or saw."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What is left out of a message's identity beyond provider fields. One per episode."""

    volatile: tuple[str, ...] = (
        r"x-anthropic-billing-header:.*",
        r".*\b(?:today['’]s date|current (?:date|time|datetime))\b.*",
    )
    """Regular expressions, case ignored: a line of a system message that one matches whole is not part of it."""
    summary: str = (
        r"\bsummary of (?:the |our |this |your |my )?(?:whole |entire |full )?(?:conversation|discussion|session|chat"
        r"|work|progress|history|context|turns|steps|previous|earlier|prior)"
        r"|\b(?:previous|prior|earlier|preceding) (?:conversation|context|session|messages|turns|steps)\b"
        r"|\bconversation so far\b|<summary>"
        r"|\b(?:context|conversation|history) (?:was|has been|is) (?:compacted|condensed|summari[sz]ed)"
    )
    """A first user message in which this is found may stand for the turns that were compacted away."""


DEFAULT_RULES = Rules()


class Match(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a request hangs.

    parent_id: the node it hangs on, or None for a root.
    n_matched: leading messages of the request that the parent's request and reply already say.
    edge: what the messages say: None, `extends`, `rerendered` (system or tools changed) or `compacts`. Give it to
        `classify` with the token ids for what is true of the tokens.
    cause: of a fork, a root or an edge other than `extends`; None where the client just went on.
    rules: what had to be overlooked in the parent's reply as it was sent back, or in the system message.
    kept: leading messages of the parent's request + reply that this request begins with; None: all of them.
        `events.Messages.kept` records it.
    resent: the parent's reply as the client sent it, where that is not what was answered.
    repeats_id: the last interaction that asked exactly this (another sample; or what is retried, see `as_retry`).
    prefix_hash: hex, for `InteractionRecorded.prefix_hash`.
    """

    parent_id: str | None = None
    n_matched: int = 0
    edge: Edge | None = None
    cause: str | None = None
    rules: tuple[str, ...] = ()
    kept: int | None = None
    resent: dict[str, Any] | None = None
    repeats_id: str | None = None
    prefix_hash: str
    messages: Sequence[Message]  # the request's; do not change them afterwards
    state: "_Prefix"  # for `TreeIndex.add`
    known: "_Known | None" = None  # for `TreeIndex.add`

    @property
    def is_lossy(self) -> bool:
        """Whether the client's history differs in more than form from what the model said."""
        return not LOSSY.isdisjoint(self.rules)

    def as_retry(self) -> "Match":
        """The same request as a second try of `repeats_id`, whose answer never arrived: it hangs on that one.

        The new interaction takes the place of the one it hangs on: prompt and messages are those of that request.
        """
        if self.repeats_id is None:
            raise ValueError("only a request that was asked before can be a retry; repeats_id is None")
        return msgspec.structs.replace(
            self,
            parent_id=self.repeats_id,
            edge="retries",
            cause="retried",
            kept=self.state.n,
            n_matched=len(self.messages),
            rules=(),
            resent=None,
        )


class Placed(msgspec.Struct, frozen=True):
    """An edge once the tokens are known. shared: first tokens of the parent's path that the prompt begins with."""

    edge: Edge | None
    cause: str | None
    shared: int
    differs_at: int | None = None  # index of the first token that is not the parent's; None where all are


def shared_prefix(a_ids: Ints | Sequence[int], b_ids: Ints | Sequence[int]) -> int:
    """Length of the common prefix of two token lists."""
    n = min(len(a_ids), len(b_ids))
    if not n:  # most turns: what is new stands behind all of the parent's tokens
        return 0
    a, b = np.asarray(a_ids), np.asarray(b_ids)
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def classify(match: Match, parent_path: Ints | Sequence[int], prompt_ids: Ints | Sequence[int]) -> Placed:
    """The edge by tokens. parent_path: the parent's prompt and output ids; prompt_ids: the whole new prompt."""
    if match.parent_id is None:
        return Placed(None, match.cause, 0)
    shared = shared_prefix(parent_path, prompt_ids)
    if shared == len(parent_path) and match.edge == "extends":
        return Placed("extends", match.cause, shared)
    differs_at = shared if shared < len(parent_path) else None
    if match.edge == "compacts":  # a root in all but memory: it shares nothing, and its tokens stand alone
        return Placed("compacts", match.cause, 0, differs_at)
    if match.edge == "retries":
        return Placed("retries", match.cause, shared, differs_at)
    cause = match.cause
    if cause is None:
        cause = next((_CAUSES[rule] for rule in match.rules if rule in _CAUSES), "rendered anew")
    return Placed("rerendered", cause, shared, differs_at)


_CAUSES = {
    "reasoning": "reasoning removed",
    "text": "history edited",
    "arguments": "arguments rewritten",
    "numbers": "arguments rewritten",
    "call ids": "call ids changed",
    "whitespace": "whitespace changed",
    "system line": "system only",
}


# ---------------------------------------------------------------- what a message says

_DROPPED = ("cache_control", "citations", "annotations", "logprobs", "index", "id", "status", "output_config")
_REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_SYSTEM = frozenset({"system", "developer"})
_THOUGHT = re.compile(r"\A(?:\s*<think>)?.*?</think>", re.DOTALL)


def _number(text: str) -> int | float | str:
    """3.0 is 3: a JavaScript client does not know the difference."""
    value = float(text)
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if np.isfinite(value) else text


_decode = msgspec.json.Decoder(float_hook=_number).decode
_sorted = msgspec.json.Encoder(order="sorted").encode
_encode = msgspec.json.Encoder().encode


def canonical_json(value: Any) -> bytes:
    """JSON text, or a value, as one spelling: keys sorted, no blanks, 3.0 as 3. Text that is no JSON stays text."""
    if value is None or value == "":
        return b"{}"
    text = value if isinstance(value, str) else _encode(value)
    try:
        return _sorted(_decode(text))
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return str(value).strip().encode("utf-8", "surrogatepass")


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return _sorted(part).decode()
    kind = part.get("type")
    if kind in _TEXT_PARTS or (kind is None and "text" in part):
        return part.get("text") or ""
    if kind in _REASONING_PARTS:
        return ""
    return _sorted({k: v for k, v in part.items() if k not in _DROPPED and v is not None}).decode()


def text_of(message: Message) -> str:
    """The text of a message: a string, or its parts joined; reasoning parts are left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not content:
        return ""
    return "".join(map(_part, content if isinstance(content, list | tuple) else [content]))


def _calls(message: Message) -> list[tuple[str, Any, str]]:
    """(name, arguments as sent, id or "") of each tool call."""
    calls = []
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping):
            function = call.get("function") or call.get("custom") or call
            arguments = function.get("arguments", function.get("input"))
            calls.append((function.get("name") or "", arguments, call.get("id") or ""))
    return calls


def _key(text: str) -> bytes:
    return xxh3_128_digest(text.encode("utf-8", "surrogatepass"))  # a JSON escape may be a lone surrogate


class _Prefix(msgspec.Struct, frozen=True, gc=False):
    """The state of the chain after some messages. Only older states are pointed at, so there are no cycles."""

    key: bytes  # chain over tools and messages
    bare: bytes  # the same without tools and system messages
    n: int  # messages so far
    tools: bytes
    system: bytes = b""  # what the system messages say
    verbatim: bytes = b""  # the system messages to the letter
    ids: tuple[str, ...] = ()  # of the last tool calls, in order
    n_answers: int = 0  # tool messages since
    is_spoken: bool = False  # ends with an assistant message
    before: "_Prefix | None" = None  # the longest shorter prefix that is spoken

    def spoken(self) -> "_Prefix | None":
        return self if self.is_spoken else self.before


class _Node(msgspec.Struct, frozen=True, gc=False):
    interaction_id: str
    parent_id: str | None
    request: _Prefix
    path: _Prefix  # after the reply
    reply: bytes  # JSON, as answered
    said: bytes  # the same, hashed


class _Known(msgspec.Struct, frozen=True, gc=False):
    """A request as it was sent: the first `state.n` messages of a list that requests which go on share."""

    messages: list[Message]
    state: _Prefix
    interaction_id: str


def _start(tools_key: bytes) -> _Prefix:
    return _Prefix(tools_key, b"", 0, tools_key)


def _tools_key(tools: Sequence[Tool]) -> bytes:
    said: list[Any] = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            said.append([function.get("name"), function.get("description") or "", function.get("parameters") or {}])
        else:
            said.append({k: v for k, v in tool.items() if k not in _DROPPED and v is not None})
    return xxh3_128_digest(_sorted(said)) if said else b""


def _say_reply(message: Message) -> tuple[bytes, tuple[str, ...]]:
    """What an assistant message says, hashed, and the ids of its tool calls."""
    text = text_of(message)
    if "</think>" in text:
        text = _THOUGHT.sub("", text, count=1)
    said = b"assistant" + _key(text.strip())
    calls = _calls(message)
    if not calls:
        return said, ()
    said += _key(repr([(name, canonical_json(arguments)) for name, arguments, _ in calls]))
    return said, tuple(call_id for _, _, call_id in calls)


def _json(value: Any) -> bytes:
    try:
        return _encode(value)
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value).encode()


def differences(answered: Message, resent: Message) -> tuple[str, ...]:
    """Which rules make a reply as it came back the same as the reply that was given; () if none is needed.

    Form only: `fields`, `parts`. Lossy: `reasoning`, `whitespace`, `text`, `arguments`, `numbers`, `call ids`.
    """
    if answered == resent:
        return ()
    rules = []
    if _reasoning(answered) != _reasoning(resent):
        rules.append("reasoning")
    a, b = (_THOUGHT.sub("", t, count=1) if "</think>" in t else t for t in map(text_of, (answered, resent)))
    if a != b and "reasoning" not in rules:
        rules.append("whitespace" if a.strip() == b.strip() else "text")
    elif a.strip() != b.strip():
        rules.append("text")
    if type(answered.get("content")) is not type(resent.get("content")) and isinstance(resent.get("content"), list):
        rules.append("parts")
    ours, theirs = _calls(answered), _calls(resent)
    ids = [call_id for _, _, call_id in theirs]
    if ids != [call_id for _, _, call_id in ours] or "" in ids or len(set(ids)) < len(ids):
        rules.append("call ids")
    for (_, sent, _), (_, back, _) in zip(ours, theirs, strict=False):
        if sent == back:
            continue
        rule = "arguments"
        if canonical_json(sent) == canonical_json(back) and _exact_json(sent) != _exact_json(back):
            rule = "numbers"
        if rule not in rules:
            rules.append(rule)
    return tuple(rules) or ("fields",)


def _exact_json(value: Any) -> Any:
    if value is None or value == "":
        return b"{}"
    try:
        return _sorted(msgspec.json.decode(value)) if isinstance(value, str) else _sorted(value)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return value


def _reasoning(message: Message) -> str:
    said = message.get("reasoning_content") or message.get("reasoning") or ""
    content = message.get("content")
    if isinstance(content, str) and "</think>" in content:
        found = _THOUGHT.match(content)
        return str(said) + (found.group() if found else "")
    if isinstance(content, list):
        said = str(said) + "".join(
            str(p.get("thinking") or p.get("text") or p.get("data") or "")
            for p in content
            if isinstance(p, Mapping) and p.get("type") in _REASONING_PARTS
        )
    return str(said)


class TreeIndex:
    """The nodes of one episode, found by what was said. Not thread-safe: one event loop, or one lock, owns it."""

    def __init__(self, rules: Rules = DEFAULT_RULES) -> None:
        self._volatile = re.compile("|".join(f"(?:{r})" for r in rules.volatile) or r"(?!)", re.IGNORECASE)
        self._summary = re.compile(rules.summary, re.IGNORECASE)
        self._nodes: dict[str, _Node] = {}
        self._by_path: dict[bytes, _Node] = {}  # chain after the reply -> the last node that says so
        self._by_bare: dict[bytes, _Node] = {}
        self._by_request: dict[bytes, str] = {}
        self._by_calls: dict[tuple[bytes, tuple[str, ...]], bytes] = {}  # (bare chain before, call ids) -> the reply
        self._by_reply: dict[bytes, _Node] = {}  # a reply alone -> the last node that gave it
        self._by_root: dict[tuple[bytes, bytes], list[_Node]] = {}  # (tools, system) -> its last nodes
        self._known: dict[tuple[int, bytes, bytes], _Known] = {}  # (length, last text, reply) -> request
        self._systems: dict[str, tuple[bytes, bytes]] = {}
        self._tools: list[tuple[Sequence[Tool], bytes]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, interaction_id: object) -> bool:
        return interaction_id in self._nodes

    # ------------------------------------------------------------ asking

    def resolve(self, messages: Sequence[Message], tools: Sequence[Tool] = (), parent_id: str | None = None) -> Match:
        """The node that this request continues, among every node of the episode.

        parent_id: the client named its parent (`previous_response_id`); messages may then hold only what is new.
        Raises KeyError if that parent is not of this episode.
        """
        if parent_id is not None:
            return self._resolve_named(parent_id, messages, tools)
        state, known = self._walk(_start(self._key_of(tools)), messages)
        node, place = self._find(self._by_path, state.spoken())
        is_edited = any(m.get("role") == "assistant" for m in messages[place:])
        match = self._drift(state, messages, place) if is_edited or node is None else None
        if match is None:
            cause = "history edited" if is_edited else None
            if node is None:
                match = self._match(state, messages, cause=cause)
            else:
                match = self._extend(node, place, state, messages, cause)
        return msgspec.structs.replace(match, known=known) if known is not None else match

    def add(self, interaction_id: str, match: Match, reply: Message) -> str:
        """Put the answered request into the tree. Returns the hex `reply_hash`. The same id twice changes nothing."""
        known = self._nodes.get(interaction_id)
        if known is None:
            known = self._insert(interaction_id, match.parent_id, match.state, reply)
            if match.messages:
                self._remember(known, match)
        return known.path.key.hex()

    @classmethod
    def from_events(cls, events: Iterable[Event], rules: Rules = DEFAULT_RULES) -> "TreeIndex":
        """The index of one episode from its events, oldest first; other kinds of events are passed over."""
        index = cls(rules)
        for event in events:
            fact = event.fact
            if not isinstance(fact, InteractionRecorded) or event.messages is None or event.interaction_id is None:
                continue
            said = decode_messages(event.messages)
            parent = index._nodes.get(fact.parent_id or "")
            if parent is None or said.kept == 0:
                inherited = b"" if parent is None else parent.path.tools
                state = _start(inherited if said.tools is None else index._key_of(said.tools))
            elif said.kept is not None:
                state = parent.request
            elif said.resent is not None:
                state = index._step(parent.request, said.resent)
            else:
                state = parent.path
            for message in said.request:
                state = index._step(state, message)
            index._insert(event.interaction_id, fact.parent_id, state, said.reply)
        return index

    def reply(self, interaction_id: str) -> dict[str, Any]:
        """The assistant message that an interaction answered. Raises KeyError for one of another episode."""
        said: dict[str, Any] = json.loads(self._nodes[interaction_id].reply)
        return said

    # ------------------------------------------------------------ the chain

    def _key_of(self, tools: Sequence[Tool]) -> bytes:
        if not tools:
            return b""
        for known, key in self._tools:
            if known == tools:
                return key
        key = _tools_key(tools)
        self._tools = [(tools, key), *self._tools[:7]]
        return key

    def _walk(self, root: _Prefix, messages: Sequence[Message]) -> tuple[_Prefix, _Known | None]:
        """The state after all messages, and the known request that begins them, where one is found."""
        known = self._recall(root, messages)
        state = root if known is None else known.state
        for message in messages[state.n :]:
            state = self._step(state, message)
        return state, known

    def _recall(self, root: _Prefix, messages: Sequence[Message]) -> _Known | None:
        """The request that was answered by the last assistant message, if all before it is equal to the letter."""
        for at in range(len(messages) - 1, 0, -1):
            if messages[at].get("role") == "assistant":
                last = _key(text_of(messages[at - 1]))
                known = self._known.get((at, last, _say_reply(messages[at])[0]))
                if known is None or known.state.tools != root.tools:
                    return None
                # Equality of dicts runs in C: some tens of nanoseconds a message.
                return known if known.messages[:at] == messages[:at] else None
        return None

    def _remember(self, node: _Node, match: Match) -> None:
        n = match.state.n
        if n != len(match.messages) or n == 0:
            return
        key = (n, _key(text_of(match.messages[-1])), node.said)
        if key in self._known:
            return
        if match.known is None:
            messages = list(match.messages)
        else:
            messages, m = match.known.messages, match.known.state.n
            if len(messages) > m:  # another request went on from there already
                messages = messages[:m]
            messages.extend(match.messages[m:])
        self._known[key] = _Known(messages, match.state, node.interaction_id)
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _step(self, state: _Prefix, message: Message) -> _Prefix:
        role = message.get("role") or ""
        ids, n_answers, system, verbatim = state.ids, state.n_answers, state.system, state.verbatim
        if role == "assistant":
            said, ids = _say_reply(message)
            n_answers = 0
            if ids:
                # The same calls by id are the same turn, whatever a client did to text and arguments.
                said = self._by_calls.get((state.bare, ids), said)
        elif role in _SYSTEM:
            said, letters = self._say_system(text_of(message))
            system = xxh3_128_digest(state.system + said)
            verbatim = xxh3_128_digest(state.verbatim + letters)
        elif role == "tool":
            # Which call it answers: by id where that says it, else by position.
            sent = message.get("tool_call_id") or ""
            place = ids.index(sent) if ids.count(sent) == 1 else n_answers
            said = b"tool%d:" % place + _key(text_of(message).strip())
            n_answers += 1
        else:
            said = role.encode() + _key(text_of(message).strip())
            name = message.get("name")
            if name:
                said += _key(name)
        return _Prefix(
            xxh3_128_digest(state.key + said),
            state.bare if role in _SYSTEM else xxh3_128_digest(state.bare + said),
            state.n + 1,
            state.tools,
            system,
            verbatim,
            ids,
            n_answers,
            role == "assistant",
            state.spoken(),
        )

    def _say_system(self, text: str) -> tuple[bytes, bytes]:
        """What a system message says without its volatile lines, and what it says to the letter; both hashed."""
        found = self._systems.get(text)
        if found is None:
            kept = (line for line in text.split("\n") if not self._volatile.fullmatch(line.strip()))
            found = b"system" + _key("\n".join(kept).strip()), _key(text)
            if len(self._systems) >= 64:
                del self._systems[next(iter(self._systems))]
            self._systems[text] = found
        return found

    def _insert(self, interaction_id: str, parent_id: str | None, request: _Prefix, reply: Message) -> _Node:
        path = self._step(request, reply)
        said, ids = _say_reply(reply)
        node = _Node(interaction_id, parent_id, request, path, _json(reply), said)
        self._nodes[interaction_id] = node
        self._by_path[path.key] = node
        self._by_bare[path.bare] = node
        self._by_request[request.key] = interaction_id
        self._by_reply[said] = node
        if ids and all(ids) and len(set(ids)) == len(ids):
            self._by_calls.setdefault((request.bare, ids), said)
        recent = self._by_root.setdefault((request.tools, request.system), [])
        recent.append(node)
        del recent[:-8]
        return node

    # ------------------------------------------------------------ the answer

    def _find(self, nodes: Mapping[bytes, _Node], state: _Prefix | None) -> tuple[_Node | None, int]:
        """The node with the longest path that is a prefix, and the prefix's length."""
        by_key = nodes is self._by_path
        while state is not None:
            node = nodes.get(state.key if by_key else state.bare)
            if node is not None:
                return node, state.n
            state = state.before
        return None, 0

    def _match(
        self,
        state: _Prefix,
        messages: Sequence[Message],
        *,
        node: _Node | None = None,
        edge: Edge | None = None,
        n_matched: int = 0,
        kept: int | None = None,
        cause: str | None = None,
        rules: tuple[str, ...] = (),
        resent: dict[str, Any] | None = None,
    ) -> Match:
        return Match(
            parent_id=None if node is None else node.interaction_id,
            n_matched=n_matched,
            edge=edge,
            cause=cause,
            rules=rules,
            kept=kept,
            resent=resent,
            repeats_id=self._by_request.get(state.key),
            prefix_hash=state.key.hex(),
            state=state,
            messages=messages,
        )

    def _extend(
        self, node: _Node, place: int, state: _Prefix, messages: Sequence[Message], cause: str | None = None
    ) -> Match:
        resent = dict(messages[place - 1])
        rules = () if _json(resent) == node.reply else differences(json.loads(node.reply), resent)
        is_resent = bool(rules) and rules != ("fields",)
        if state.verbatim != node.path.verbatim and state.system == node.path.system:
            rules = (*rules, "system line")
        return self._match(
            state,
            messages,
            node=node,
            edge="extends",
            n_matched=place,
            cause=cause,
            rules=rules,
            resent=resent if is_resent else None,
        )

    def _resolve_named(self, parent_id: str, messages: Sequence[Message], tools: Sequence[Tool]) -> Match:
        node = self._nodes.get(parent_id)
        if node is None:
            raise KeyError(f"{parent_id!r} is no interaction of this episode; name one that it answered")
        if len(messages) >= node.path.n:
            state, _ = self._walk(_start(self._key_of(tools)), messages)
            spoken = state.spoken()
            while spoken is not None:
                if spoken.key == node.path.key:
                    return self._extend(node, spoken.n, state, messages)
                spoken = spoken.before
        # Only what is new came; a system message is sent along each time and is not new where it says the same.
        n_system = 0
        leading = _start(b"")
        while n_system < len(messages) and messages[n_system].get("role") in _SYSTEM:
            leading = self._step(leading, messages[n_system])
            n_system += 1
        if leading.system != node.path.system:
            n_system = 0
        state = node.path
        for message in messages[n_system:]:
            state = self._step(state, message)
        return self._match(state, messages, node=node, edge="extends", n_matched=n_system)

    def _drift(self, state: _Prefix, messages: Sequence[Message], place: int) -> Match | None:
        """What became of a history that is not, as it stands, a path of the tree. None: nothing that is known."""
        node, where = self._find(self._by_bare, state.spoken())
        if node is not None and where > place:
            same_tools, same_system = node.path.tools == state.tools, node.path.system == state.system
            cause = "tools changed" if same_system else "system only" if same_tools else "handoff"
            if same_tools and same_system:
                cause = "history edited"  # a system message moved
            return self._match(state, messages, node=node, edge="rerendered", kept=0, cause=cause)
        for at in range(len(messages) - 1, place - 1, -1):
            if messages[at].get("role") == "assistant":
                last = self._by_reply.get(_say_reply(messages[at])[0])
                if last is not None and last.path.n > at + 1 and last.path.tools == state.tools:
                    asked = (
                        k.messages for k in reversed(self._known.values()) if k.interaction_id == last.interaction_id
                    )
                    history = next(asked, [])
                    is_cut = all(m in history for m in messages[:at])
                    cause = "history cut" if is_cut else "summary"
                    return self._match(state, messages, node=last, edge="compacts", kept=0, cause=cause)
                return None
        recent = self._by_root.get((state.tools, state.system))
        if place or not recent:
            return None
        told = "\n".join(text_of(m) for m in messages if m.get("role") == "user")
        for last in reversed(recent):
            if last.request.n <= len(messages):
                continue
            said = text_of(json.loads(last.reply)).strip()
            if len(said) >= 40 and said in told:
                return self._match(state, messages, node=last, edge="compacts", kept=0, cause="summary")
        last = recent[-1]
        if last.path.n > len(messages) + 1 and self._summary.search(told):
            return self._match(state, messages, node=last, edge="compacts", kept=0, cause="summary")
        return None


_REMEMBERED = 16_384
"""Requests of one episode that are recalled whole; one that fell out is hashed again, message by message."""
