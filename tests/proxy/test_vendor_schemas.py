"""What schemathesis makes of the schemas of every API that is served: no 5xx, and refusals that say something."""

import anyio
import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from proxy_serving import said, serving
from rollbook.proxy import bodies
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.dialects import chat, completions, messages, responses

SHAPES = {
    "/v1/chat/completions": chat.Body,
    "/v1/completions": completions.Body,
    "/v1/responses": responses.Body,
    "/v1/messages": messages.Body,
    "/rl/set_reward": bodies.SetReward,
}

TEXT = {"type": "string", "maxLength": 20}


def thing(*required: str, **properties: object) -> dict:
    return {"type": "object", "required": list(required), "properties": properties}


PART = thing("type", "text", type={"enum": ["text", "input_text", "image_url"]}, text=TEXT)
CONTENT = {"anyOf": [TEXT, {"type": "array", "maxItems": 3, "items": PART}]}
MESSAGE = thing("role", "content", role={"enum": ["system", "developer", "user", "assistant"]}, content=CONTENT)
TOOL = thing("type", "function", type={"const": "function"}, function=thing("name", name=TEXT))


@pytest.fixture(scope="module")
def running():
    """(key, http client) of one server for the whole module, in a thread."""
    config = ServeConfig(admin_key="admin-key-of-the-tests", body_s=2)
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(lambda _: said("ok"), config=config)) as served,
        httpx.Client(base_url=served.url, trust_env=False, timeout=60) as http,
    ):
        yield portal.call(served.client.start_session, "t").api_key, http
        assert http.get("/health").json()["status"] == "ok"


def document() -> dict:
    """OpenAPI of what is served, from the types that decode it; messages and tools as the vendors describe them."""
    (_, components) = msgspec.json.schema_components(SHAPES.values(), ref_template="#/components/schemas/{name}")
    paths = {}
    for path, kind in SHAPES.items():
        [refs], own = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
        name = refs["$ref"].rpartition("/")[2]
        unique = path.replace("/", "_")
        shape = own[name]
        for field in ("messages", "input"):
            if field in shape["properties"]:
                shape["properties"][field] = {"type": "array", "minItems": 1, "maxItems": 4, "items": MESSAGE}
        if "chat" in path:
            shape["properties"]["tools"] = {"type": "array", "maxItems": 2, "items": TOOL}
        for other, content in own.items():
            components[unique + other if other == name else other] = content
        paths[path] = {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{unique}{name}"}}},
                },
                "responses": {"200": {"description": "an answer"}},
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollbook", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


SCHEMA = schemathesis.openapi.from_dict(document())


@pytest.mark.parametrize("path", SHAPES)
def test_what_the_schemas_allow_and_forbid_is_answered_or_refused(running, path):
    key, http = running
    seen = set()
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

        @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=SCHEMA[path]["POST"].as_strategy(generation_mode=mode))
        def check(case):
            body = case.body if isinstance(case.body, bytes) else msgspec.json.encode(case.body)
            reply = http.post(path, content=body, headers={"x-api-key": key, "content-type": "application/json"})
            seen.add(reply.status_code)
            assert reply.status_code < 500, reply.text
            if reply.status_code >= 400:
                assert reply.json()["error"]["message"]

        check()
    assert 400 in seen
