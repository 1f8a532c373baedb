"""What the page asks of the server: who may, what comes, and that nobody's words become anything but data."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollbook.app.config import ConfigError
from rollbook.app.web import page_of, read_assets, viewing
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.scripted import ScriptedEngine
from rollbook.proxy.server import Service, serve
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import Event, open_book, prune
from rollbook.store.events import EpisodeOpened
from views_books import interaction
from web_book import HOSTILE, TOKENIZER, make_book

pytestmark = pytest.mark.anyio

API = "/ui/api"
QUESTIONS = [
    "book",
    "stamp",
    "runs",
    "episodes",
    "groups",
    "failures",
    "losses?run=r",
    "episode?id=e",
    "tokens?id=i",
    "group?run=r&group=g",
]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("web") / "book"
    make_book(path)
    return path


@pytest.fixture
async def client(made: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with viewing(made, tokenizer=str(TOKENIZER)) as address:
        url, _, key = address.partition("/ui/#key=")
        async with httpx.AsyncClient(timeout=60, base_url=url, headers={"authorization": f"Bearer {key}"}) as client:
            yield client


async def told(client: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = await client.get(f"{API}/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("question", [*QUESTIONS, "canned/task_curve"])
async def test_nobody_reads_without_the_key(client: httpx.AsyncClient, question: str) -> None:
    async with httpx.AsyncClient(timeout=60, base_url=client.base_url) as stranger:
        assert (await stranger.get(f"{API}/{question}")).status_code == 401
        wrong = await stranger.get(f"{API}/{question}", headers={"authorization": "Bearer é".encode("latin-1")})
        assert wrong.status_code == 403
        assert (await stranger.post(f"{API}/sql", json={"query": "select 1"})).status_code == 401


async def test_the_page_of_a_served_book_is_for_its_admin(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(TOKENIZER)
    with open_book(tmp_path / "book", writer="proxy") as book:
        service = Service(
            log=book.log,
            engine=ScriptedEngine(lambda *_: []),
            tokenizer=tokenizer,
            config=ServeConfig(port=0, run_id="r"),
            book=book,
        )
        async with (
            serve(service, [page_of(service, "a book")]) as url,
            httpx.AsyncClient(timeout=60, base_url=url) as client,
        ):
            admin = {"authorization": f"Bearer {service.admin_key}"}
            assert (await client.get("/ui")).status_code == 200
            session = (await client.post("/rl/start_session", json={"task_id": "t"}, headers=admin)).json()
            own = {"authorization": f"Bearer {session['api_key']}"}
            assert (await client.get(f"{API}/runs", headers=own)).status_code == 403
            assert (await client.get(f"{API}/runs")).status_code == 401
            runs = (await client.get(f"{API}/runs", headers=admin)).json()
            assert [(run["run_id"], run["open"]) for run in runs] == [("r", 1)]


async def test_a_book_is_viewed_from_this_machine_only(made: Path) -> None:
    with pytest.raises(ConfigError, match="this machine only"):
        async with viewing(made, host="0.0.0.0"):
            pass


async def test_every_answer_carries_the_content_policy(client: httpx.AsyncClient) -> None:
    for path in ("/ui", "/ui/static/app.js", f"{API}/runs", f"{API}/episode?id=nobody", f"{API}/nothing"):
        headers = (await client.get(path)).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


async def test_the_page_has_no_script_of_its_own_and_no_address_elsewhere() -> None:
    assets = {name: asset.content.decode() for name, asset in read_assets().items() if not name.startswith("vendor/")}
    for name, text in assets.items():
        for word in ("https://", "http://", "innerHTML", "dangerously", "eval(", "new Function"):
            assert word not in text.replace("http://www.w3.org/2000/svg", ""), name
    page = assets["index.html"]
    assert page.count("<script") == page.count('<script type="module" src="/ui/static/') == 1
    assert "style=" not in page
    assert "<style" not in page


async def test_files_are_sent_once(client: httpx.AsyncClient) -> None:
    first = await client.get("/ui/static/app.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = await client.get("/ui/static/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["nothing.js", "../web.py", "..%2fweb.py", "%2fetc%2fpasswd", "vendor/"])
async def test_only_the_pages_own_files_are_sent(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(f"/ui/static/{path}")
    assert answer.status_code == 404


async def test_runs_say_what_the_tables_say(client: httpx.AsyncClient, made: Path) -> None:
    runs = {run["run_id"]: run for run in await told(client, "runs")}
    with open_book(made) as book:
        for row in book.canned("run_compare").to_pylist():
            run = runs.pop(row["run_id"])
            assert (run["episodes"], run["failed"], run["calls"]) == (
                row["episodes"],
                row["failed"],
                row["interactions"],
            )
            assert run["reward_mean"] == pytest.approx(row["train_reward"])
    assert not runs


async def test_pages_of_a_list_are_the_list(client: httpx.AsyncClient) -> None:
    whole = await told(client, "episodes", limit=500)
    assert whole["total"] == len(whole["rows"]) == 193
    pieces = [await told(client, "episodes", limit=50, offset=offset) for offset in range(0, 200, 50)]
    assert [row for piece in pieces for row in piece["rows"]] == whole["rows"]
    assert {piece["total"] for piece in pieces} == {193}
    assert (await told(client, "episodes", offset=1000))["rows"] == []


async def test_lists_are_sorted_and_filtered_by_the_server(client: httpx.AsyncClient) -> None:
    best = await told(client, "episodes", sort="-reward", where="n_interactions > 2 and reward > 0 -- only those")
    rewards = [row["reward"] for row in best["rows"]]
    assert rewards == sorted(rewards, reverse=True)
    assert all(row["n_interactions"] > 2 and row["reward"] > 0 for row in best["rows"])
    assert 0 < best["total"] < 193
    point = await told(client, "episodes", run="math/grpo", version=3, is_eval="false")
    assert point["total"] == 12
    assert {(row["version"], row["is_eval"]) for row in point["rows"]} == {(3, False)}
    groups = await told(client, "groups", run="math/grpo", sort="-reward_std", limit=3)
    assert groups["total"] == 24
    assert groups["rows"][0]["reward_std"] >= groups["rows"][2]["reward_std"]
    failed = await told(client, "failures", run="math/grpo")
    assert failed["total"] == len(failed["rows"]) > 0


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"where": "1) union select 1, * from read_csv('/etc/passwd') where (true"}, "read_csv"),
        ({"where": "true); drop table episodes; select (true"}, "one SELECT"),
        ({"where": "no_such_column > 1"}, "no_such_column"),
        ({"sort": "reward; drop table episodes"}, "cannot sort"),
        ({"sort": "key_sha256"}, "cannot sort"),
        ({"limit": 100000}, "limit"),
        ({"offset": -1}, "offset"),
        ({"offset": "x"}, "int"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_what_cannot_be_asked_is_refused_in_a_sentence(
    client: httpx.AsyncClient, params: dict[str, Any], words: str
) -> None:
    answer = await client.get(f"{API}/episodes", params=params)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_a_group_comes_with_its_episodes_as_they_are_told_alone(client: httpx.AsyncClient) -> None:
    group = await told(client, "group", run="math/grpo", group="math/grpo/9", limit=3)
    ids = [row["episode_id"] for row in group["rows"]]
    assert len(ids) == 3 <= group["total"]
    assert group["episodes"] == [await told(client, "episode", id=name) for name in ids]
    rewards = [row["reward"] for row in group["rows"] if row["reward"] is not None]
    assert rewards == sorted(rewards, reverse=True)


async def test_an_episode_comes_with_its_tree_rewards_and_credits(client: httpx.AsyncClient, made: Path) -> None:
    rows = await told(client, "episodes", where="n_interactions = 4 and state = 'done'", limit=1)
    episode_id = rows["rows"][0]["episode_id"]
    one = await told(client, "episode", id=episode_id)
    assert "key_sha256" not in one["episode"]
    calls = one["interactions"]
    assert [call["parent_id"] for call in calls][:2] == [None, calls[0]["interaction_id"]]
    assert calls[0]["reply"]["tool_calls"][0]["function"]["name"] == "calculator"
    assert calls[0]["tools"][0]["function"]["name"] == "calculator"
    assert any(call["edge"] == "rerendered" and call["rewards"] for call in calls)
    with open_book(made) as book:
        for scheme in ("tree", "broadcast"):
            table = book.credits(scheme, episode_ids=[episode_id])
            credit = dict(zip(*table.select(["interaction_id", "credit"]).to_pydict().values(), strict=True))
            calls = (await told(client, "episode", id=episode_id, scheme=scheme))["interactions"]
            assert {call["interaction_id"]: call["credit"] for call in calls} == credit
    missing = await client.get(f"{API}/episode", params={"id": "nobody"})
    assert missing.status_code == 404


async def test_tokens_are_spelt_and_have_their_logprobs(client: httpx.AsyncClient, made: Path) -> None:
    rows = await told(client, "episodes", run="math/grpo", limit=1)
    call = (await told(client, "episode", id=rows["rows"][0]["episode_id"]))["interactions"][1]
    tokens = await told(client, "tokens", id=call["interaction_id"])
    output = tokens["output"]
    assert "".join(output["texts"]) == call["reply"]["content"]
    assert len(output["ids"]) == len(output["logprobs"]) == len(output["versions"]) == call["n_output"]
    assert len(tokens["prompt"]["ids"]) == call["n_prompt"] - call["n_shared"]
    with open_book(made) as book:
        assert book.interaction(call["interaction_id"]).output_ids.tolist() == output["ids"]
    async with viewing(made) as address:  # no tokenizer: numbers
        url, _, key = address.partition("/ui/#key=")
        async with httpx.AsyncClient(timeout=60, base_url=url, headers={"authorization": f"Bearer {key}"}) as plain:
            assert (await told(plain, "tokens", id=call["interaction_id"]))["output"]["texts"] is None
    assert (await client.get(f"{API}/tokens", params={"id": "nobody"})).status_code == 404


async def test_queries_go_through_the_sandbox_and_numbers_stay_exact(client: httpx.AsyncClient) -> None:
    query = "select 9007199254740993 as big, 'nan'::double as nan, 0.25::decimal(5, 2) as d, [1, 2] as many, null as no"
    table = (await client.post(f"{API}/sql", json={"query": query})).json()
    assert table["rows"] == [["9007199254740993", "nan", 0.25, [1, 2], None]]
    assert [column["kind"] for column in table["columns"]][:4] == ["number", "number", "number", "text"]
    for refused in (
        "select * from read_text('/etc/passwd')",
        "delete from episodes",
        "select 1; select 2",
        "from range(20000)",
    ):
        answer = await client.post(f"{API}/sql", json={"query": refused})
        assert answer.status_code == 400, refused
        assert answer.json()["error"]["message"]


async def test_ready_made_questions_are_answered(client: httpx.AsyncClient) -> None:
    book = await told(client, "book")
    for question in book["questions"]:
        answer = await told(client, f"canned/{question['name']}")
        assert answer["columns"], question["name"]
    gap = await told(client, "canned/logprob_gap_by_staleness", run="math/grpo")
    assert [row[1] for row in gap["rows"]] == [0, 1, 2]
    assert (await client.get(f"{API}/canned/nothing")).status_code == 404
    assert (await client.get(f"{API}/canned/slowest", params={"limit": "many"})).status_code == 400
    assert (await client.get(f"{API}/canned/slowest", params={"color": "red"})).status_code == 400


async def test_losses_are_counted_by_reason(client: httpx.AsyncClient) -> None:
    losses = await told(client, "losses", run="math/grpo")
    assert {row["reason"]: row["episodes"] for row in losses["discards"]} == {"all rewards equal": 6, "no reward": 6}
    [ending] = losses["endings"]
    [error] = losses["errors"]
    assert ending["episodes"] == error["calls"] == 7
    behind = await told(client, "episodes", run="math/grpo", state=ending["state"], reason=ending["reason"])
    assert behind["total"] == 7


async def test_hostile_words_come_back_as_they_are_and_only_as_json(client: httpx.AsyncClient) -> None:
    answer = await client.get(f"{API}/episode", params={"id": "ep_hostile"})
    assert answer.headers["content-type"] == "application/json"
    one = answer.json()
    assert one["episode"]["group_id"] == HOSTILE
    assert one["interactions"][0]["reply"]["content"] == HOSTILE
    assert one["failures"][0]["message"] == HOSTILE
    assert (await told(client, "groups", run=f"hostile/{HOSTILE}"))["rows"][0]["group_id"] == HOSTILE


async def test_the_page_follows_what_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "book"
    with open_book(path, writer="agent") as writer:
        async with viewing(path) as address:
            url, _, key = address.partition("/ui/#key=")
            async with httpx.AsyncClient(
                timeout=60, base_url=url, headers={"authorization": f"Bearer {key}"}
            ) as client:
                before = (await told(client, "stamp"))["stamp"]
                assert await told(client, "runs") == []
                writer.log.append_blocking(Event(run_id="r", fact=EpisodeOpened(task_id="t"), episode_id="e"))
                assert (await told(client, "stamp"))["stamp"] > before
                assert [run["run_id"] for run in await told(client, "runs")] == ["r"]
                writer.log.append_blocking(interaction("i"))
                writer.log.seal()
                (before,) = (await told(client, "episode", id="e"))["interactions"]
                assert prune(path, episode_ids=["e"]).n_left == 0
                (after,) = (await told(client, "episode", id="e"))["interactions"]
                assert (before["is_pruned"], after["is_pruned"]) == (False, True)
                assert (await told(client, "tokens", id="i"))["output"] == {
                    "ids": [], "texts": None, "logprobs": [], "versions": []
                }  # fmt: skip
