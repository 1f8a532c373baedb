"""What every dialect is parsed into and rendered from: one request, one stream of pieces, one reply.

Dialects (`dialects/`) translate between a vendor's JSON and these; `capture.py` turns a Request into pieces and a
durable event. Messages and tools are in chat-completions form, the lingua franca of chat templates.
"""

from typing import Any

import msgspec

from rollbook.store.events import Float32s, Int32s

from .engine import EMPTY_IDS, EMPTY_LOGPROBS, FinishReason, Sampling

Message = dict[str, Any]
Tool = dict[str, Any]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, whatever API it came by."""

    dialect: str  # chat | responses | messages | completions (one message, its content is the raw prompt)
    messages: list[Message]
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] = "auto"  # auto | none | required | {"type": "function", ...}
    model: str = "default"
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    n: int = 1
    is_stream: bool = False
    wants_logprobs: bool = False
    top_logprobs: int = 0
    store: bool = True  # False: answer, do not train on it
    interaction_id: str | None = None  # the id that the answer gets, since streams show it before there is one
    # The client named its parent (previous_response_id): `messages` are then only those after the parent's reply,
    # led by a system message that replaces the parent's, if any.
    parent_id: str | None = None
    idempotency_key: str | None = None
    retries: int = 0  # how often the client says that it has sent this before
    choice: int = 0  # which of several answers to one request this is
    body_sha256: str | None = None
    response_format: dict[str, Any] | None = None
    role: str | None = None  # which of several agents asks
    max_total_tokens: int | None = None  # cap of prompt and answer together
    template: dict[str, Any] = {}  # what the chat template is given besides messages and tools
    extra: dict[str, Any] = {}  # what the dialect needs to render its reply


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as sampled: arguments are the model's own text, which may not be JSON."""

    id: str
    name: str
    arguments: str


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of a streamed reply; at most one of text, reasoning, tool_* is new in it.

    The first piece of a reply, and only it, has the interaction_id and the prompt's length; it says nothing else and
    comes before the engine is asked, when nothing can be wrong with the request any more.
    token_ids and logprobs are those that came with it (empty while text is held back for a parser).
    tool_index is the place of the call in the reply; its first piece has id and name, later ones only arguments.
    """

    text: str = ""
    reasoning: str = ""
    tool_index: int | None = None
    tool_id: str | None = None
    tool_name: str | None = None
    tool_arguments: str = ""
    token_ids: list[int] = []
    logprobs: list[float] = []
    interaction_id: str | None = None
    prompt_tokens: int = 0


class Reply(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A finished answer, durable by the time anybody sees it."""

    interaction_id: str
    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | str = "stop"  # stop | length | tool_calls | abort
    prompt_tokens: int = 0
    sampled: Int32s = EMPTY_IDS
    sampled_logprobs: Float32s = EMPTY_LOGPROBS
    prompt_ids: list[int] | None = None
    created: int = 0  # seconds since the epoch
    model: str = "default"
    version: int = 0  # policy version of the last token

    @property
    def n_output(self) -> int:
        return len(self.sampled)

    @property
    def output_ids(self) -> list[int]:
        ids: list[int] = self.sampled.tolist()
        return ids

    @property
    def logprobs(self) -> list[float]:
        logprobs: list[float] = self.sampled_logprobs.tolist()
        return logprobs
