"""Which tokens may come next, so that an answer keeps its form. For the embedded engine; llguidance does the work.

A `Guide` belongs to one request and knows where its answer stands. Special tokens are no text: a mark that is one is
matched by its id, and no other may come, save the request's stop tokens once the form is whole.
"""

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .engine import Form
from .errors import BadRequest
from .form import GAP, SEPARATOR, THOUGHT

_KEPT = 64  # forms that are kept ready

# White space that the model likes may stand in JSON, but not without end: weak models never leave it.
_JSON_STYLE = {"whitespace_flexible": True, "whitespace_pattern": "[ \\n\\t]{0,24}"}


class Guides:
    """Of one tokenizer. Threads may share it."""

    def __init__(self, model: Path, n_vocab: int) -> None:
        """model: a folder with tokenizer.json. n_vocab: rows of the model's head. Raises BadRequest."""
        try:
            import llguidance
        except ImportError:
            raise BadRequest(
                "this server cannot hold an answer to a form: it was installed without llguidance (pip install "
                "'rollbook[forms]'); leave out response_format, and ask for tools with tool_choice auto",
                param="response_format",
            ) from None
        try:
            tokens = (model / "tokenizer.json").read_text("utf-8")
        except OSError as error:
            raise BadRequest(
                f"this server cannot hold an answer to a form: its model has no tokenizer.json to read tokens with "
                f"({error})",
                param="response_format",
            ) from error
        self._lib: Any = llguidance
        self._tokens: Any = llguidance.LLTokenizer(tokens, n_vocab=n_vocab)
        added = json.loads(tokens).get("added_tokens") or ()
        self._special = {
            t["content"]: int(t["id"]) for t in added if self._tokens.is_special_token(int(t["id"])) and t["content"]
        }
        self.n_vocab = n_vocab
        self._ready: OrderedDict[bytes, Any] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, form: Form, stops: frozenset[int], min_tokens: int = 0) -> "Guide":
        """For a new answer. May take a while for a large schema. Raises BadRequest for one that cannot be enforced."""
        key = msgspec.json.encode(form)
        with self._lock:
            ready = self._ready.pop(key, None)
        if ready is None:
            ready = self._lib.LLMatcher(
                self._tokens, self._lib.LLMatcher.grammar_from_lark(self._lark(form)), log_level=0
            )
            if ready.is_error():
                why = ready.get_error().strip().splitlines()
                raise BadRequest(
                    f"this form cannot be enforced: {(why or ['the schema is not understood'])[0][:300]}",
                    param="response_format" if form.schema is not None else "tools",
                )
        with self._lock:
            self._ready[key] = ready
            while len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        return Guide(ready.deep_copy(), self.n_vocab, stops, min_tokens, self._tokens.eos_tokens)

    def _lark(self, form: Form) -> str:
        rules: list[str] = []
        ways: list[str] = []
        if form.schema is not None:
            ways.append("answer")
            rules.append(f"answer: {_json(form.schema)}")
        if form.calls:
            ways.append("call" if form.is_single else f"call ({_literal(SEPARATOR)} call)*")
            rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(form.calls))))
            for i, call in enumerate(form.calls):
                rules.append(f"call_{i}: {self._marks(call.begin)} arguments_{i} {self._marks(call.end)}")
                rules.append(f"arguments_{i}: {_json(call.schema)}")
        begin, end = THOUGHT
        before = {"none": "", "open": "thought ", "may": f"({self._marks(begin)} thought)? "}[form.thought]
        if form.thought != "none":
            rules += ["thought: thinking GAP", f"GAP: /{GAP}/"]
            if end in self._special:
                rules += [f"thinking: THINKING {self._marks(end)}", "THINKING: /(?s:.*)/"]
            else:
                rules.append(f"thinking[suffix={_literal(end)}]: /(?s:.*)/")
        return "\n".join([f"start: {before}(" + " | ".join(ways) + ")", *rules])

    def _marks(self, text: str) -> str:
        """Text as a sequence of literals and special tokens."""
        found: list[str] = []
        while text:
            places = [(at, mark) for mark in self._special if (at := text.find(mark)) >= 0]
            at, mark = min(places, key=lambda place: (place[0], -len(place[1])), default=(len(text), ""))
            if at:
                found.append(_literal(text[:at]))
            if mark:
                found.append(f"<[{self._special[mark]}]>")
            text = text[at + len(mark) :]
        return " ".join(found)


def _literal(text: str) -> str:
    return json.dumps(text)


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_STYLE})


class Guide:
    """Where one answer stands."""

    def __init__(self, matcher: Any, n_vocab: int, stops: frozenset[int], min_tokens: int, never: list[int]) -> None:
        self._matcher = matcher
        self._bits = np.zeros((n_vocab + 31) // 32, np.int32)
        self._n_vocab = n_vocab
        self._stops = [stop for stop in stops if stop < n_vocab]
        self._never = never  # the library's own ends, which are ours only if the request says so
        self._n_left = min_tokens

    def allowed(self) -> npt.NDArray[np.bool_]:
        """bool [n_vocab]: the tokens that may come next. Raises BadRequest where the form is too much to say that."""
        matcher, bits = self._matcher, self._bits
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            why = matcher.get_error().strip()[:300]
            raise BadRequest(f"the answer's form is too large to be followed: {why}", param="response_format")
        allowed = np.unpackbits(bits.view(np.uint8), count=self._n_vocab, bitorder="little").view(np.bool_)
        allowed[self._never] = False
        if matcher.is_accepting() and (self._n_left <= 0 or not allowed.any()):
            allowed[self._stops] = True
        return allowed

    def take(self, token: int) -> None:
        """The token that was drawn."""
        self._n_left -= 1
        if token not in self._stops:
            self._matcher.consume_token(token)

    @property
    def is_over(self) -> bool:
        """The form is whole, nothing can follow, and there is no stop token that could say so."""
        return not self._stops and bool(self._matcher.is_stopped())
