"""`gconfig`: defaults where a request is silent, caps where it asks for more, and recorded either way."""

import httpx
import msgspec
import pytest

from proxy_serving import said, serving
from rollbook.proxy.config import Asked, GenerationHyperparameters, ServeConfig, settle
from rollbook.proxy.errors import BadRequest

ADMIN = "admin-key-of-the-tests"
HELLO = [{"role": "user", "content": "hi"}]


async def drawn(gconfig, **asked):
    """The recorded interaction of one request under these settings."""
    config = ServeConfig(admin_key=ADMIN, gconfig=gconfig)
    async with serving(lambda _: said("one two three"), config=config) as served:
        key = (await served.client.start_session("t")).api_key
        async with httpx.AsyncClient(timeout=60, base_url=served.url, trust_env=False) as http:
            body = {"messages": HELLO, **asked}
            reply = await http.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
        assert reply.status_code == 200, reply.text
        [event] = served.events("InteractionRecorded")
        return event


@pytest.mark.anyio
async def test_a_silent_request_is_drawn_as_the_run_says():
    gconfig = GenerationHyperparameters(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=4, stop=("zzz",))
    event = await drawn(gconfig)
    sampling = event.fact.sampling
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.7, 0.9, 5)
    assert sampling["stop"] == ["zzz"]
    assert len(event.output_ids) == 4
    assert event.fact.finish_reason == "length"


@pytest.mark.anyio
async def test_a_request_may_ask_for_less_and_not_for_more_than_the_cap():
    gconfig = GenerationHyperparameters(max_new_tokens=6, greedy=True)
    assert (await drawn(gconfig)).fact.sampling["temperature"] == 0
    assert len((await drawn(gconfig, max_tokens=3)).output_ids) == 3
    assert len((await drawn(gconfig, max_completion_tokens=10)).output_ids) == 6


@pytest.mark.anyio
async def test_prompt_and_answer_together_keep_to_their_cap():
    whole = await drawn(GenerationHyperparameters())
    cap = whole.fact.prompt_length + 2
    event = await drawn(GenerationHyperparameters(max_tokens=cap))
    assert event.fact.prompt_length + len(event.output_ids) == cap


@pytest.mark.anyio
async def test_what_engines_cannot_draw_with_is_recorded_as_what_they_draw_with():
    assert (await drawn(GenerationHyperparameters(), temperature=1e-5)).fact.sampling["temperature"] == 0.01


def test_a_huge_top_k_is_none_at_all():
    for off in (-1, 0, 100_000_000):
        assert settle(Asked(top_k=off), GenerationHyperparameters())[0].top_k == 0
    assert settle(Asked(), GenerationHyperparameters(top_k=100_000_000))[0].top_k == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"stop_token_ids": (5, -1)},
        {"stop_token_ids": (1 << 31,)},
        {"presence_penalty": 3.0},
        {"stop": ("",)},
        {"min_p": 2.0},
    ],
)
def test_what_no_engine_could_draw_with_is_refused_by_name(asked):
    with pytest.raises(BadRequest) as refused:
        settle(Asked(**asked), GenerationHyperparameters())
    assert refused.value.param == next(iter(asked))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"frequency_penalty": float("inf")},
        {"top_p": 2},
        {"min_new_tokens": 5, "max_new_tokens": 3},
        {"n": 1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises((msgspec.ValidationError, ValueError)):
        msgspec.convert(wrong, GenerationHyperparameters)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_concurrent", 0),
        ("max_sessions", 0),
        ("max_waiting", -1),
        ("max_ended", -1),
        ("max_body_bytes", 0),
        ("idle_s", 0),
        ("grace_s", -1),
        ("stall_s", float("nan")),
        ("stop_s", float("inf")),
    ],
)
def test_a_server_that_could_not_work_is_refused_by_name(name, value):
    with pytest.raises(msgspec.ValidationError, match=f"{name} must be at least"):
        msgspec.convert({name: value}, ServeConfig)
