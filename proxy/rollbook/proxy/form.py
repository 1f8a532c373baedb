"""The forms that clients insist on: how calls are written, and what servers call a form.

Whether it is enforced is the engine's business (`engine.Form`). The embedded engine masks tokens itself (`guide.py`);
servers are told in xgrammar's structural tags, which vLLM and SGLang both take.
"""

from typing import Any

import msgspec

from .engine import Form
from .errors import BadRequest

NAME = "\0name\0"
"""Stands for the function's name, as JSON, in what comes before a call's arguments."""

CALL_WRITINGS = {
    "hermes": (f'<tool_call>\n{{"name": {NAME}, "arguments": ', "}\n</tool_call>"),
    "json": (f'{{"name": {NAME}, "arguments": ', "}"),
    "llama": (f'{{"name": {NAME}, "parameters": ', "}"),
    "mistral": (f'[TOOL_CALLS][{{"name": {NAME}, "arguments": ', "}]"),
}
"""By parser: what stands before and after a call's arguments where the template does not show it."""

SEPARATOR = "\n"
"""Between two calls."""

GAP = "[ \\n]{0,4}"
"""After a thought, as a regular expression."""

THOUGHT = ("<think>", "</think>")


def schema_of(response_format: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema that a response_format asks for. Raises BadRequest."""
    if response_format["type"] == "json_object":
        return {"type": "object"}
    given = response_format.get("json_schema")
    schema = given.get("schema", {"type": "object"}) if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise BadRequest("response_format.json_schema.schema must be a JSON schema", param="response_format")
    return schema


def structural_tag(form: Form) -> str:
    """A form in xgrammar's words, as JSON."""
    parts: list[dict[str, Any]] = []
    if form.schema is not None:
        parts.append({"type": "json_schema", "json_schema": form.schema})
    if form.calls:
        tags = [
            {
                "type": "tag",
                "begin": call.begin,
                "content": {"type": "json_schema", "json_schema": call.schema},
                "end": call.end,
            }
            for call in form.calls
        ]
        parts.append(
            {
                "type": "tags_with_separator",
                "tags": tags,
                "separator": SEPARATOR,
                "at_least_one": True,
                "stop_after_first": form.is_single,
            }
        )
    said = parts[0] if len(parts) == 1 else {"type": "or", "elements": parts}
    begin, end = THOUGHT
    if form.thought != "none":
        thought: dict[str, Any] = {
            "type": "tag",
            "begin": "" if form.thought == "open" else begin,
            "content": {"type": "any_text"},
            "end": end,
        }
        thought = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": GAP}]}
        if form.thought == "may":
            thought = {"type": "optional", "content": thought}
        said = {"type": "sequence", "elements": [thought, said]}
    return msgspec.json.encode({"type": "structural_tag", "format": said}).decode()
