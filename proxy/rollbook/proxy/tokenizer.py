"""A model folder's tokenizer and chat template, without transformers.

Reads `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
`chat_template.jinja` as Hugging Face writes them. Templates run in the sandbox with the names that they expect there,
so that the same folder gives the same text here and in transformers. What to render is `render.py`'s business.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
import tokenizers

from rollbook.store.events import Int32s

from .errors import BadRequest

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
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.eos_ids = eos_ids
        self.max_length = max_length
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
        )

    def encode(self, text: str) -> Int32s:
        """int32 [n]; nothing is added at either end, special tokens written out in the text become their ids."""
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

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
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._specials, **variables},
            )
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error.message}", param="messages"
            ) from error
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise BadRequest(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from error


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


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
