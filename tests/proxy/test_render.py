"""Templates of every temper: deltas are trusted where they hold, and what the template rewrites is followed.

The templates are written here in the manner of the families named; each shows one habit.
"""

import itertools

import pytest

from proxy.talk import BASH, Talk, said, system, tool, user
from rollbook.proxy.capture import CaptureSettings
from rollbook.proxy.render import Renderer, Ways
from rollbook.proxy.tokenizer import Tokenizer

TURN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
THOUGHT = "{%- set thought = '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' if m.reasoning_content else '' %}"
LAST = "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
LAST += "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
SPOKEN = "{{- '<|im_start|>assistant\\n' + thought + m.content + '<|im_end|>\\n' }}"

TEMPLATES = {
    # A default system prompt where none was said.
    "default system": (
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{%- endif %}"
        f"{{%- for m in messages %}}{TURN}{{%- endfor %}}{ASK}"
    ),
    # Reasoning only after the last question (Qwen3).
    "last thoughts": (
        f"{LAST}{{%- for m in messages %}}{{%- if m.role == 'assistant' %}}{THOUGHT}"
        "{%- if loop.index0 < ns.last %}{%- set thought = '' %}{%- endif %}"
        f"{SPOKEN}{{%- else %}}{TURN}{{%- endif %}}{{%- endfor %}}{ASK}"
    ),
    # The prompt opens the thought; history never shows one (DeepSeek R1).
    "opened thought": (
        f"{{%- for m in messages %}}{TURN}{{%- endfor %}}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    ),
    # Roles must alternate, blanks around what is said, system inside the first question (Llama 2).
    "alternating": (
        "{%- if messages[0].role == 'system' %}{%- set rest = messages[1:] %}"
        "{%- set lead = messages[0].content + '\\n\\n' %}"
        "{%- else %}{%- set rest = messages %}{%- set lead = '' %}{%- endif %}{%- for m in rest %}"
        "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{%- endif %}"
        "{%- if m.role == 'user' %}{{- '[I] ' + (lead if loop.first else '') + m.content | trim + ' [/I]' }}"
        "{%- else %}{{- ' ' + m.content | trim + ' <|im_end|>' }}{%- endif %}{%- endfor %}"
    ),
    # Tools and system stand before the last question, wherever that is (Mistral).
    "moving tools": (
        f"{LAST}{{%- for m in messages %}}{{%- if tools and loop.index0 == ns.last %}}"
        f"{{{{- '<tools>' + tools | tojson + '</tools>' }}}}{{%- endif %}}{TURN}{{%- endfor %}}{ASK}"
    ),
    # Parallel results share one turn (Qwen2.5).
    "joined results": (
        "{%- for m in messages %}{%- if m.role == 'tool' %}"
        "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
        "{{- '\\n<tool_response>' + m.content + '</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
        "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + m.content }}"
        "{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>\\n' }}"
        "{{- {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '\\n</tool_call>' }}"
        f"{{%- endfor %}}{{{{- '<|im_end|>\\n' }}}}{{%- else %}}{TURN}{{%- endif %}}{{%- endfor %}}{ASK}"
    ),
    # Turns end without an end token.
    "no end": "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}{{- 'assistant: ' }}",
    # A long history is cut in the middle.
    "forgetful": (
        "{%- for m in messages %}{%- if loop.first or loop.index0 >= messages | length - 9 %}"
        f"{TURN}{{%- endif %}}{{%- endfor %}}{ASK}"
    ),
}


@pytest.fixture(params=list(TEMPLATES))
def template(request, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATES[request.param])
    return request.param, str(file)


def renderer(tmp_path, name):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATES[name])
    return Renderer(Tokenizer.load("bytes", chat_template=file))


@pytest.mark.parametrize(
    ("name", "ways", "reason"),
    [
        ("default system", Ways(), None),
        ("default system", Ways(has_system=True), None),
        ("last thoughts", Ways(), None),
        ("last thoughts", Ways(has_reasoning=True), "reasoning removed by template"),
        ("opened thought", Ways(), "history rewritten by template"),
        ("alternating", Ways(), None),
        ("alternating", Ways(has_system=True), None),
        ("moving tools", Ways(), None),
        ("moving tools", Ways(has_tools=True), "history rewritten by template"),
        ("joined results", Ways(has_calls=True), None),
        ("joined results", Ways(has_tools=True, has_calls=True, has_system=True), None),
        ("default system", Ways(has_calls=True), "tool calls rewritten by template"),
        ("no end", Ways(), "end-of-turn token"),
        ("forgetful", Ways(), "history rewritten by template"),
    ],
)
def test_the_check_says_whether_deltas_are_exact_and_why_not(tmp_path, name, ways, reason):
    check = renderer(tmp_path, name).check(ways)
    assert check.is_exact == (reason is None)
    assert reason is None or any(reason in given for given in check.reasons)


REPLIES = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


@pytest.mark.anyio
@pytest.mark.parametrize("has_system", [False, True])
@pytest.mark.parametrize("has_thoughts", [False, True])
async def test_a_plain_chat_reads_as_the_template_writes_it(template, has_system, has_thoughts):
    """Where a reply is spelt as the template spells it, the prompt's text is that of the whole conversation."""
    name, file = template
    thought = "\n</think>\n\n" if name == "opened thought" else ""
    replies = [
        (f"thought {n}" if thought else f"<think>\nthought {n}\n</think>\n\n") * has_thoughts + thought + reply
        for n, reply in enumerate(REPLIES)
    ]
    async with Talk(*replies, template=file) as talk:
        told = ([system("s")] if has_system else []) + [user("q")]
        for n in range(len(REPLIES)):
            reply = await talk.ask(told)
            prompt = talk.tokenizer.decode(reply.prompt_ids)
            plain = talk.capture.renderer.plain(told)
            expected = talk.tokenizer.render(plain, add_generation_prompt=True)
            if name == "alternating":  # the model does not sample the blanks that this template writes
                prompt, expected = prompt.replace(" ", ""), expected.replace(" ", "")
            assert prompt == expected, n
            told += [said(reply), user(f"q{n}")]
        talk.check_book()
        edges = {talk.fact(i).edge for i in list(talk.recorded)[1:5]}  # before anything is forgotten
        is_kept = not has_thoughts and name not in ("opened thought", "no end")
        assert edges == ({"extends"} if is_kept else {"rerendered"})


CALL = '<tool_call>\n{"name": "bash", "arguments": {"x": %d}}\n</tool_call>'


@pytest.mark.anyio
async def test_a_tool_loop_keeps_its_thoughts_until_the_next_question(tmp_path):
    """In the manner of Qwen3: thoughts stay while tools are called, and go with the next question."""
    file = tmp_path / "template.jinja"
    calls = "{%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n' + {'name': c.function.name, 'arguments': "
    calls += "c.function.arguments} | tojson + '\\n</tool_call>' }}{%- endfor %}"
    file.write_text(
        TEMPLATES["last thoughts"].replace(
            "m.content + '<|im_end|>\\n' }}", f"m.content }}}}{calls}{{{{- '<|im_end|>\\n' }}}}", 1
        )
    )
    thought = "<think>\nhm {}\n</think>\n\n"
    script = [thought.format(1) + CALL % 1, thought.format(2) + "so", thought.format(3) + "well"]
    async with Talk(*script, template=str(file)) as talk:
        told = [user("q")]
        first = await talk.ask(told, tools=[BASH])
        told += [said(first), tool(first.tool_calls[0].id, "out")]
        second = await talk.ask(told, tools=[BASH])
        assert talk.fact(second).edge == "extends"
        assert "hm 1" in talk.tokenizer.decode(second.prompt_ids)
        told += [said(second), user("next")]
        third = await talk.ask(told, tools=[BASH])
        fact = talk.fact(third)
        assert (fact.parent_id, fact.edge, fact.cause) == (
            second.interaction_id,
            "rerendered",
            "reasoning removed by template",
        )
        assert fact.shared == len(first.prompt_ids)
        assert "hm" not in talk.tokenizer.decode(third.prompt_ids)
        talk.check_book()


@pytest.mark.anyio
async def test_a_rewritten_reply_keeps_the_sampled_tokens_of_what_is_left(tmp_path):
    spelt = [Tokenizer.load("bytes").backend.token_to_id(c) for c in "<think>"]  # reads `<think>`, encodes otherwise
    async with Talk([5, 78, 6, *spelt, 2], "ok") as talk:
        first = await talk.ask([user("q")])
        assert (first.reasoning, first.content) == ("h", "<think>")
        second = await talk.ask([user("q"), said(first), user("r")])
        begin = len(first.prompt_ids)
        assert second.prompt_ids[begin : begin + len(spelt) + 1] == [*spelt, 2]
        talk.check_book()


@pytest.mark.parametrize("ways", [Ways(*w) for w in itertools.product([False, True], repeat=4)])
def test_our_template_is_exact_in_every_way(ways):
    check = Renderer(Tokenizer.load("bytes", chat_template="chatml_tools")).check(ways)
    assert check.is_exact, check.reasons


def test_unknown_parsers_are_named():
    with pytest.raises(ValueError, match="tool_parser is 'x'"):
        Renderer(Tokenizer.load("bytes"), tool_parser="x")


@pytest.mark.anyio
async def test_template_variables_of_a_request_reach_the_template(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{- 'hard ' if effort == 'high' else 'easy ' }}" + TEMPLATES["default system"])
    async with Talk("one", "two", template=str(file), settings=CaptureSettings(template={"effort": "low"})) as talk:
        low = await talk.ask([user("q")], template={"unknown": 1})
        high = await talk.ask([user("q")], template={"effort": "high"})
        assert talk.tokenizer.decode(low.prompt_ids).startswith("easy ")
        assert talk.tokenizer.decode(high.prompt_ids).startswith("hard ")


def test_a_head_that_many_share_is_encoded_once_and_the_same():
    tokenizer = Tokenizer.load("bytes")
    renderer = Renderer(tokenizer)
    for n in range(80):
        for question in ("one", "two"):
            told = [system(f"{n} " + "Be good. " * 80), user(question)]
            text = tokenizer.render(told, [BASH], add_generation_prompt=True)
            assert renderer.root(told, [BASH]).tolist() == tokenizer.encode(text).tolist()
    assert len(renderer._heads) == 64


@pytest.mark.anyio
async def test_a_template_that_wants_short_ids_gets_them(tmp_path):
    """In the manner of Mistral: ids of nine characters, written beside calls and results."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
        "{%- elif m.role == 'tool' %}"
        "{%- if m.tool_call_id | length != 9 %}{{ raise_exception('nine, please') }}{%- endif %}"
        "{{- '[TOOL_RESULTS]' + {'id': m.tool_call_id, 'content': m.content} | tojson + '[/TOOL_RESULTS]' }}"
        "{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}"
        "{%- if c.id | length != 9 %}{{ raise_exception('nine, please') }}{%- endif %}"
        "{{- (', ' if not loop.first else '') }}"
        "{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
        "{%- endfor %}{{- ']<|im_end|>' }}"
        "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    )
    script = ['[TOOL_CALLS][{"name": "bash", "arguments": {"a":1}}, {"name": "bash", "arguments": {}}]', "so", "well"]
    async with Talk(*script, template=str(file)) as talk:
        assert talk.capture.renderer.check(Ways(has_tools=True, has_calls=True)).is_exact
        told = [user("q")]
        for n in range(3):
            reply = await talk.ask(told, tools=[BASH])
            told += [said(reply), *(tool(c.id, "out") for c in reply.tool_calls or ())]
            told += [] if reply.tool_calls else [user(f"q{n}")]
        facts = [talk.fact(i) for i in talk.recorded]
        assert [f.edge for f in facts] == [None, "extends", "extends"]
        assert '"id": "' in talk.tokenizer.decode(reply.prompt_ids).split("[TOOL_RESULTS]")[1]
        assert "call_" not in talk.tokenizer.decode(reply.prompt_ids)
        talk.check_book()


@pytest.mark.anyio
async def test_results_are_told_beside_calls_of_the_ids_that_the_client_gave_them(tmp_path):
    """A template may look a result's call up by its id."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{%- set ns = namespace(ids=[]) %}{%- for m in messages %}{%- for c in m.tool_calls or [] %}"
        "{%- set ns.ids = ns.ids + [c.id] %}{%- endfor %}{%- if m.role == 'tool' and m.tool_call_id not in ns.ids %}"
        "{{ raise_exception('a result without a call') }}{%- endif %}{%- endfor %}" + TEMPLATES["joined results"]
    )
    for history in ("template", "exact"):
        settings = CaptureSettings(history=history)
        async with Talk(
            "<tool_call>\n" + '{"name": "bash", "arguments": {}}' + "\n</tool_call>",
            "so",
            template=str(file),
            settings=settings,
        ) as talk:
            first = await talk.ask([user("q")], tools=[BASH])
            back = said(first)
            back["tool_calls"][0]["id"] = "call_0"
            second = await talk.ask([user("q"), back, tool("call_0", "out")], tools=[BASH])
            assert talk.fact(second).edge == "extends"
            talk.check_book()
