"""The same folder gives the same ids and the same text here and in transformers."""

import json
import threading
import time
from pathlib import Path

import pytest

from rollbook.proxy.errors import BadRequest
from rollbook.proxy.tokenizer import TEMPLATES, TOKENIZERS, Tokenizer

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"q": 'é\n"x" <b>', "n": [1, 2.5]}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "dé <&>", "parameters": {"type": "object"}}}]
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi 👋 <|im_end|>"},
    {"role": "assistant", "content": "calling", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "42"},
    {"role": "assistant", "content": "it is 42", "reasoning_content": "so"},
    {"role": "user", "content": "thanks"},
]


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(TOKENIZERS / "bytes"))


@pytest.mark.parametrize("template", [None, "chatml_tools"])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("ask", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_a_chat_has_the_ids_that_transformers_gives(theirs, template, tools, ask, n):
    ours = Tokenizer.load("bytes", chat_template=template)
    chat = CHAT[:n] if n > 1 else CHAT[1:2]
    text = ours.render(chat, tools, add_generation_prompt=ask)
    kwargs = {"tools": tools, "add_generation_prompt": ask, "chat_template": ours.chat_template}
    assert text == theirs.apply_chat_template(chat, tokenize=False, **kwargs)
    assert ours.encode(text).tolist() == theirs.apply_chat_template(chat, return_dict=False, **kwargs)


QUIRKS = """{%- set ns = namespace(n=0) %}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% generation %}
    {{ m.content | trim }}{{ eos_token }}
    {% endgeneration %}
    {% set ns.n = ns.n + 1 %}
    {% if ns.n > 2 %}{% break %}{% endif %}
{% endfor %}
{{ {'b': 1, 'a': 'é'} | tojson }}{{ {'b': 1} | tojson(indent=2) }}{{ strftime_now('%Y') }}{{ flag }}
"""


def test_a_template_finds_all_that_it_finds_in_transformers(theirs, tmp_path):
    file = tmp_path / "quirks.jinja"
    file.write_text(QUIRKS)
    ours = Tokenizer.load("bytes", chat_template=file)
    chat = [{"role": r, "content": f" {r}\n"} for r in ("user", "skip", "assistant", "user", "user")]
    text = ours.render(chat, flag="on")
    assert text == theirs.apply_chat_template(chat, chat_template=QUIRKS, tokenize=False, flag="on")
    assert {"messages", "flag"} <= ours.template_names


def test_what_a_template_refuses_is_the_clients_mistake_in_the_templates_words(tmp_path):
    file = tmp_path / "strict.jinja"
    file.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="roles must alternate"):
        Tokenizer.load("bytes", chat_template=file).render([])


def test_a_template_cannot_leave_the_sandbox(tmp_path):
    file = tmp_path / "evil.jinja"
    file.write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(BadRequest):
        Tokenizer.load("bytes", chat_template=file).render([])


def test_any_text_survives_encoding_and_decoding():
    ours = Tokenizer.load("bytes")
    text = "héllo\n\t 日本 👩‍👩‍👧 <tool_call> \x00"
    assert ours.decode(ours.encode(text)) == text


def copy(folder: Path, **changes: object) -> Path:
    for file in (TOKENIZERS / "bytes").iterdir():
        (folder / file.name).write_text(file.read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_end_tokens_and_length_come_from_the_folder(tmp_path):
    folder = copy(tmp_path, eos_token={"content": "<|im_end|>", "special": True}, model_max_length=int(1e30))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    ours = Tokenizer.load(folder)
    assert ours.eos_ids == (0, 2)
    assert ours.max_length is None
    assert Tokenizer.load("bytes").eos_ids == (2,)
    assert Tokenizer.load("bytes").max_length == 8192


def test_a_template_may_stand_in_the_tokenizer_config(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = copy(tmp_path, chat_template=named)
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.load(folder).render([]) == "tools"


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (copy(tmp_path) / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="chatml_tools"):
        Tokenizer.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no_such"):
        Tokenizer.load(tmp_path, chat_template="no_such")


def test_our_templates_are_read():
    assert [f.stem for f in TEMPLATES.iterdir()] == ["chatml_tools"]


def test_a_long_text_stops_no_other_thread():
    tokenizer = Tokenizer.load("bytes")
    text = "x" * 1_000_000

    def longest() -> float:
        """The longest time that this thread had to wait, as a share of all."""
        stalls, last = [], time.monotonic()
        working = threading.Thread(target=tokenizer.encode, args=(text,))
        working.start()
        while working.is_alive():
            time.sleep(0.005)
            now = time.monotonic()
            stalls.append(now - last)
            last = now
        return max(stalls) / sum(stalls)

    assert any(longest() < 0.5 for _ in range(5))  # whatever else stops us once
    assert tokenizer.encode(text).tolist() == tokenizer.encode("x").tolist() * 1_000_000
