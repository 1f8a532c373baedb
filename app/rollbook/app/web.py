"""The web page of a book at /ui: its files, and the questions that it asks over JSON.

It only reads. Whoever has the key may ask; the page's files alone are for everybody, since they say nothing about the
book. What a model or a person wrote is data: it leaves here as JSON, the page sets it as text, and the content policy
lets nothing run that did not come from this folder. Conditions and queries that a person types go through the sandbox.
"""

import hashlib
import math
import mimetypes
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import duckdb
import msgspec
import pyarrow as pa
from litestar import Litestar, Request, Response, Router, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath

from rollbook.proxy.dialects import decoder
from rollbook.proxy.errors import BadRequest, Forbidden, NotFound, Unauthorized
from rollbook.proxy.listener import bind
from rollbook.proxy.parsing import Vocabulary
from rollbook.proxy.server import Service, is_loopback, listen, refuse
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.proxy.wire import bearer
from rollbook.store import Book, QueryRefused, open_book
from rollbook.store.canned import CANNED
from rollbook.store.credit import Scheme
from rollbook.store.episodes import Episode
from rollbook.store.schema import VIEWS, metadata
from rollbook.store.sql import Limits, run_query

from .config import ConfigError
from .reading import tokenizer_of

PATH = "/ui"

_FILES = Path(__file__).parent / "web_static"
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_LIMITS = Limits(timeout_s=10.0, rows=10_000, result_bytes=32 << 20)
_SAFE_INT = 1 << 53  # beyond it a browser's numbers are not exact

AnyRequest: TypeAlias = Request[Any, Any, Any]
T = TypeVar("T")


class Page:
    """What the page reads from, and who may.

    book: gives the book, opened at the first question. require: raises for a key that may not read. tokenizer: spells
    the tokens of runs that name no tokenizer of their own.
    """

    def __init__(
        self,
        book: Callable[[], Book],
        require: Callable[[str | None], None],
        *,
        name: str,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.book = book
        self.require = require
        self.name = name
        self._tokenizer = tokenizer
        self._vocabularies: dict[str, Vocabulary] = {}
        self._loading = threading.Lock()

    def spell(self, run_id: str, ids: Sequence[int]) -> list[str] | None:
        """One text per token, '' for one that ends within a character; None where the tokenizer is not here."""
        vocabulary = self._vocabulary(run_id)
        if vocabulary is None:
            return None
        stream = vocabulary.stream()
        texts = [stream.push([token]) for token in ids]
        if texts:
            texts[-1] += stream.finish()
        return texts

    def _vocabulary(self, run_id: str) -> Vocabulary | None:
        folder = tokenizer_of(self.book(), run_id) or ""
        with self._loading:
            if folder not in self._vocabularies:
                tokenizer = Tokenizer.load(folder) if folder else self._tokenizer
                if tokenizer is None:
                    return None
                self._vocabularies[folder] = Vocabulary(tokenizer)
            return self._vocabularies[folder]


Served: TypeAlias = NamedDependency[Page]


# What the page asks


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page of a list. where: a condition in SQL on its rows. sort: a column; a minus before it turns it round."""

    run: str | None = None
    group: str | None = None
    state: str | None = None
    reason: str | None = None
    version: int | None = None
    is_eval: bool | None = None
    where: str | None = None
    sort: str | None = None
    offset: int = 0
    limit: int = 100

    def __post_init__(self) -> None:
        if self.offset < 0 or not 1 <= self.limit <= 500:
            raise ValueError(f"expected offset >= 0 and limit in 1..500, got {self.offset} and {self.limit}")


class OneEpisode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode, with its credits by this scheme."""

    id: str
    scheme: Scheme = "tree"
    gamma: float = 1.0


class OneGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some episodes of a group, to look at side by side."""

    run: str
    group: str
    offset: int = 0
    limit: int = 8


class OneRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str


class OneInteraction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str


class Typed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query that a person typed."""

    query: str


_decode_typed = decoder(Typed)


def _asked(request: AnyRequest, kind: type[T], leave: Sequence[str] = ()) -> T:
    """The query string as a struct. Raises BadRequest."""
    given = {name: value for name, value in request.query_params.items() if name not in leave}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the query string: {error}") from None


def describe_book(name: str, book: Book) -> dict[str, Any]:
    """What the page needs once: its name, its tables, the questions that come ready made."""
    tables: dict[str, tuple[str | None, dict[str, str | None]]] = {
        table.name: (table.comment, {column.name: column.comment for column in table.columns})
        for table in metadata.sorted_tables
    }
    for view in VIEWS:
        tables[view.name] = view.help, dict(view.columns)
    return {
        "name": name,
        "questions": [
            {"name": one.name, "help": one.help, "params": {"run": None, **one.defaults}, "sql": one.sql.strip()}
            for one in CANNED.values()
        ],
        "tables": [
            {"name": table, "help": help_, "columns": [{"name": c, "help": text} for c, text in columns.items()]}
            for table, (help_, columns) in sorted(tables.items())
        ],
    }


def read_stamp(book: Book) -> dict[str, int]:
    """A number that rises with every event: has anything changed?"""
    return {"stamp": book.sql("select coalesce(sum(position), 0)::bigint as n from cursors")["n"][0].as_py()}


def list_runs(book: Book) -> list[dict[str, Any]]:
    """Every run that the book knows, newest first."""
    return book.sql(
        """
        with e as (
            select run_id, count(*) as episodes, count(*) filter (where state = 'open') as open,
              count(*) filter (where state in ('failed', 'abandoned', 'lost')) as failed,
              count(distinct group_id) as groups, sum(n_interactions)::bigint as calls, sum(n_output)::bigint as tokens,
              avg(reward) filter (where not coalesce(is_eval, false)) as reward_mean,
              avg(reward) filter (where is_eval) as eval_mean,
              min(opened_at) as first_at, greatest(max(opened_at), max(closed_at)) as last_at
            from episodes group by run_id
        ), b as (
            select run_id, count(*) filter (where trained_at is not null) as steps from batches group by run_id
        ), p as (select run_id, max(version) as version from policies group by run_id)
        select run_id, r.name, coalesce(r.started_at, e.first_at) as started_at, e.* exclude (run_id, first_at),
          b.steps, p.version
        from runs r full join e using (run_id) left join b using (run_id) left join p using (run_id)
        order by started_at desc nulls last, run_id
        """
    ).to_pylist()


_LISTS: Mapping[str, tuple[tuple[str, ...], str, str]] = {  # name -> its columns, its order, what breaks ties
    "episodes": (
        (
            *("episode_id", "run_id", "task_id", "group_id", "attempt", "coalesce(is_eval, false) as is_eval"),
            *("coalesce(version, version_min) as version", "version_min", "version_max", "state", "reason", "reward"),
            *("n_interactions", "n_output", "n_taken", "opened_at", "epoch(closed_at - opened_at) as seconds"),
        ),
        "-opened_at",
        "episode_id",
    ),
    "groups": (
        ("run_id", "group_id", "task_id", "n_episodes", "n_done", "n_rewarded", "reward_mean", "reward_std"),
        "group_id",
        "run_id, group_id",
    ),
    "failures": (
        ("run_id", "episode_id", "error", "message", "status", "dialect", "failed_at"),
        "-failed_at",
        "event_id",
    ),
}


def list_rows(book: Book, kind: Literal["episodes", "groups", "failures"], asked: Listing) -> dict[str, Any]:
    """One page of a list, and how many rows it has in all. Raises QueryRefused, BadRequest."""
    columns, order, ties = _LISTS[kind]
    conditions, params = ["true"], []
    for name, value in (
        ("run_id", asked.run),
        ("group_id", asked.group),
        ("state", asked.state),
        ("reason", asked.reason),
        ("coalesce(version, version_min)", asked.version),
        ("coalesce(is_eval, false)", asked.is_eval),
    ):
        if value is not None:
            conditions.append(f"{name} = ?")
            params.append(value)
    where = " and ".join(conditions)
    if asked.where and asked.where.strip():
        where += f" and (\n{asked.where}\n)"
    sort = asked.sort or order
    by, direction = sort.removeprefix("-"), "desc" if sort.startswith("-") else "asc"
    names = [column.rpartition(" as ")[2] for column in columns]
    if by not in names:
        raise BadRequest(f"cannot sort {kind} by {by!r}; expected one of {', '.join(names)}", param="sort")
    query = (
        f"select {', '.join(columns)} from {kind} where {where} order by {by} {direction} nulls last, {ties} "
        f"limit {asked.limit} offset {asked.offset}"
    )
    total = f"select count(*) as n from {kind} where {where}"
    return {
        "total": run_query(book.views, total, params, limits=_LIMITS)["n"][0].as_py(),
        "rows": run_query(book.views, query, params, limits=_LIMITS).to_pylist(),
    }


def tell_losses(book: Book, asked: OneRun) -> dict[str, Any]:
    """What never taught anything, by reason: left out of batches, not ended well, calls without an answer."""
    return {
        "discards": book.canned("discards", run=asked.run).to_pylist(),
        "endings": book.sql(
            "select state, reason, count(*) as episodes, max(closed_at) as last_at from episodes "
            "where run_id = ? and state in ('failed', 'abandoned', 'lost') group by all "
            "order by episodes desc, state, reason limit 200",
            [asked.run],
        ).to_pylist(),
        "errors": book.sql(
            "select error, status, count(*) as calls, max(failed_at) as last_at from failures where run_id = ? "
            "group by all order by calls desc, error, status limit 200",
            [asked.run],
        ).to_pylist(),
    }


def tell_group(book: Book, asked: OneGroup) -> dict[str, Any]:
    """Some episodes of a group, best first, each as `tell_episode` tells it, and how many there are in all."""
    listing = Listing(run=asked.run, group=asked.group, sort="-reward", offset=asked.offset, limit=asked.limit)
    found = list_rows(book, "episodes", listing)
    return {**found, "episodes": tell_episodes(book, [row["episode_id"] for row in found["rows"]])}


def tell_episode(book: Book, asked: OneEpisode) -> dict[str, Any]:
    """One attempt as a tree: what was said at each node beyond its parent, and what it earned. Raises NotFound."""
    return tell_episodes(book, [asked.id], asked.scheme, asked.gamma)[0]


def tell_episodes(
    book: Book, episode_ids: Sequence[str], scheme: Scheme = "tree", gamma: float = 1.0
) -> list[dict[str, Any]]:
    """Attempts as trees, in this order, asked for at once. Raises NotFound."""
    try:
        episodes = book.episodes(episode_ids)
    except KeyError as error:
        raise NotFound(str(error.args[0])) from None
    ids = [one.interaction_id for episode in episodes for one in episode.interactions]
    wanted = {"_ids": pa.table({"id": pa.array(ids, pa.string())})}
    table = book.credits(scheme, gamma, episode_ids=episode_ids)
    credits_of = dict(zip(table["interaction_id"].to_pylist(), table["credit"].to_pylist(), strict=True))
    batches = _by_interaction(
        book.sql(
            "select interaction_id, batch_id, step, credit, advantage, weight, trained_at is not null as is_trained "
            "from batch_rows join batches using (batch_id) where interaction_id in (select id from _ids) order by step",
            **wanted,
        )
    )
    scores = _by_interaction(
        book.sql(
            "select interaction_id, scorer, version, mean_logprob, mean_gap, mean_entropy from scores "
            "where interaction_id in (select id from _ids) order by version",
            **wanted,
        )
    )
    origins = {name for episode in episodes if (name := episode.row.get("origin_interaction_id")) is not None}
    of = book.sql(
        "select interaction_id, episode_id from interactions where interaction_id in (select id from _origins)",
        _origins=pa.table({"id": pa.array(sorted(origins), pa.string())}),
    )
    forked = dict(zip(of["interaction_id"].to_pylist(), of["episode_id"].to_pylist(), strict=True))
    told = [_told(episode, credits_of, batches, scores) for episode in episodes]
    for one in told:
        one["episode"]["origin_episode_id"] = forked.get(one["episode"].get("origin_interaction_id"))
    return told


def _told(
    episode: Episode,
    credits_of: Mapping[str, float | None],
    batches: Mapping[str, list[dict[str, Any]]],
    scores: Mapping[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    shown = (
        *(
            "interaction_id",
            "parent_id",
            "edge",
            "cause",
            "origin_id",
            "depth",
            "role",
            "model",
            "dialect",
            "finish_reason",
        ),
        *("n_prompt", "n_shared", "n_output", "version_min", "version_max", "seconds", "first_token_seconds"),
        *("mean_logprob", "is_trainable", "capture", "is_retried", "is_leaf", "is_pruned", "delivered", "recorded_at"),
    )
    return {
        "episode": {name: value for name, value in episode.row.items() if name not in _HIDDEN},
        "rewards": [_reward(row) for row in episode.rewards],
        "failures": [{k: row[k] for k in ("error", "message", "status", "failed_at")} for row in episode.failures],
        "interactions": [
            {
                **{name: one.row[name] for name in shown},
                "request": [] if one.is_pruned else one.request,
                "reply": {} if one.is_pruned else one.reply,
                "tools": one.tools if one.row["parent_id"] is None and not one.is_pruned else None,
                "rewards": [_reward(row) for row in one.rewards],
                "credit": credits_of.get(one.interaction_id),
                "batches": batches.get(one.interaction_id, []),
                "scores": scores.get(one.interaction_id, []),
            }
            for one in episode.interactions
        ],
    }


_HIDDEN = {"key_sha256", "main_node", "opened_by", "closed_by"}


def _reward(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: row[k] for k in ("name", "value", "weight", "source", "start", "end", "details", "given_at")}


def _by_interaction(table: pa.Table) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault(row.pop("interaction_id"), []).append(row)
    return rows


def spell_interaction(page: Page, book: Book, interaction_id: str) -> dict[str, Any]:
    """The tokens that one model call brought: its prompt beyond the parent's, and its output. Raises NotFound."""
    found = book.sql("select run_id from interactions where interaction_id = ?", [interaction_id])
    if not found.num_rows:
        raise NotFound(f"no interaction {interaction_id!r} in this book")
    run_id = found["run_id"][0].as_py()
    told = {}
    tokens = book.tokens([interaction_id])
    for part, mask in (("prompt", False), ("output", True)):
        rows = tokens.filter(pa.compute.equal(tokens["is_sampled"], mask))
        ids = rows["token_id"].to_pylist()
        told[part] = {"ids": ids, "texts": page.spell(run_id, ids)}
        if mask:
            told[part] |= {f"{name}s": rows[name].to_pylist() for name in ("logprob", "version")}
    return told


def answer_typed(book: Book, query: str) -> dict[str, Any]:
    """A table for a query that a person typed. Raises QueryRefused."""
    began = time.perf_counter()
    table = run_query(book.views, query, limits=_LIMITS)
    return {"seconds": time.perf_counter() - began, **_plain(table)}


def answer_canned(book: Book, name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """A table for one of the questions that come ready made. Raises StoreError."""
    if name not in CANNED:
        raise NotFound(f"no question {name!r}; there are {', '.join(CANNED)}")
    params: dict[str, Any] = {}
    for key, value in given.items():
        default = CANNED[name].defaults.get(key)
        try:
            params[key] = type(default)(value) if isinstance(default, int | float) else value
        except ValueError:
            raise BadRequest(f"expected a number for {key}, got {value!r}", param=key) from None
    try:
        return _plain(book.canned(name, **params))
    except duckdb.Error as error:
        raise QueryRefused(str(error).strip()) from error


def _plain(table: pa.Table) -> dict[str, Any]:
    """A table as JSON: columns with their types, rows of cells."""
    kinds = [
        "number"
        if pa.types.is_integer(f.type) or pa.types.is_floating(f.type) or pa.types.is_decimal(f.type)
        else "time"
        if pa.types.is_timestamp(f.type)
        else "text"
        for f in table.schema
    ]
    cells = [[_cell(value) for value in column.to_pylist()] for column in table.columns]
    return {
        "columns": [{"name": f.name, "kind": kind} for f, kind in zip(table.schema, kinds, strict=True)],
        "rows": [list(row) for row in zip(*cells, strict=True)],
    }


def _cell(value: Any) -> Any:
    """A value as a browser reads it exactly: what its numbers cannot hold goes as text."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float | Decimal):
        size = abs(float(value))
        if not math.isfinite(size) or (size >= _SAFE_INT and size.is_integer()):
            return str(value)
        return float(value) if isinstance(value, Decimal) else value
    return value.hex() if isinstance(value, bytes) else value


# Routes


_encode = msgspec.json.Encoder(enc_hook=str, decimal_format="number").encode


async def _answer(request: AnyRequest, page: Page, ask: Callable[[Book], Any]) -> Response[bytes]:
    """The answer to a question, with everything in it that was acknowledged before."""
    page.require(bearer(dict(request.scope["headers"])))

    def read() -> bytes:
        book = page.book()
        book.catch_up()
        return _encode(ask(book))

    return Response(
        await anyio.to_thread.run_sync(read), media_type="application/json", headers={"cache-control": "no-store"}
    )


@get("/api/book")
async def book_(request: AnyRequest, page: Served) -> Response[bytes]:
    """What the book is, and which questions it answers."""
    return await _answer(request, page, partial(describe_book, page.name))


@get("/api/stamp")
async def stamp(request: AnyRequest, page: Served) -> Response[bytes]:
    """How far the book has come."""
    return await _answer(request, page, read_stamp)


@get("/api/runs")
async def runs(request: AnyRequest, page: Served) -> Response[bytes]:
    """All runs."""
    return await _answer(request, page, list_runs)


@get("/api/episodes")
async def episodes(request: AnyRequest, page: Served) -> Response[bytes]:
    """A page of the list of episodes."""
    return await _answer(request, page, partial(list_rows, kind="episodes", asked=_asked(request, Listing)))


@get("/api/groups")
async def groups(request: AnyRequest, page: Served) -> Response[bytes]:
    """A page of the list of groups."""
    return await _answer(request, page, partial(list_rows, kind="groups", asked=_asked(request, Listing)))


@get("/api/failures")
async def failures(request: AnyRequest, page: Served) -> Response[bytes]:
    """A page of the list of model calls that got no usable answer."""
    return await _answer(request, page, partial(list_rows, kind="failures", asked=_asked(request, Listing)))


@get("/api/losses")
async def losses(request: AnyRequest, page: Served) -> Response[bytes]:
    """What never taught a run anything, and why."""
    return await _answer(request, page, partial(tell_losses, asked=_asked(request, OneRun)))


@get("/api/episode")
async def episode(request: AnyRequest, page: Served) -> Response[bytes]:
    """One episode with its tree."""
    return await _answer(request, page, partial(tell_episode, asked=_asked(request, OneEpisode)))


@get("/api/tokens")
async def tokens(request: AnyRequest, page: Served) -> Response[bytes]:
    """The tokens of one interaction."""
    asked = _asked(request, OneInteraction)
    return await _answer(request, page, lambda book: spell_interaction(page, book, asked.id))


@get("/api/group")
async def group(request: AnyRequest, page: Served) -> Response[bytes]:
    """A group's episodes, to look at side by side."""
    asked = _asked(request, OneGroup)
    return await _answer(request, page, lambda book: tell_group(book, asked))


@get("/api/canned/{name:str}")
async def canned(request: AnyRequest, page: Served, name: FromPath[str]) -> Response[bytes]:
    """The answer to one of the questions that come ready made."""
    given = dict(request.query_params)
    return await _answer(request, page, lambda book: answer_canned(book, name, given))


@post("/api/sql", status_code=200)
async def sql(request: AnyRequest, page: Served) -> Response[bytes]:
    """The answer to one SELECT, within limits."""
    page.require(bearer(dict(request.scope["headers"])))
    asked = _decode_typed(await request.body())
    return await _answer(request, page, lambda book: answer_typed(book, asked.query))


class Asset(msgspec.Struct, frozen=True):
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


def read_assets() -> dict[str, Asset]:
    """The page's files by their path; they ship with the package."""
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    assets: dict[str, Asset] = {}
    for file in sorted(_FILES.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            kind = kinds.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "text/plain"
            name = file.relative_to(_FILES).as_posix()
            assets[name] = Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return assets


Assets: TypeAlias = NamedDependency[dict[str, Asset]]


@get("/")
async def index(request: AnyRequest, assets: Assets) -> Response[bytes]:
    """The page itself."""
    return _send(request, assets["index.html"])


@get("/static/{path:path}")
async def static(request: AnyRequest, assets: Assets, path: FromPath[str]) -> Response[bytes]:
    """A file of the page."""
    asset = assets.get(path.lstrip("/"))
    if asset is None:
        raise NotFound(f"the page has no file {path!r}")
    return _send(request, asset)


def _send(request: AnyRequest, asset: Asset) -> Response[bytes]:
    headers = {"etag": asset.etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(b"", status_code=304, headers=headers, media_type=asset.media_type)
    return Response(asset.content, headers=headers, media_type=asset.media_type)


def _refuse(request: AnyRequest, error: Exception) -> Response[bytes]:
    response = refuse(request, error)
    response.headers.update({**_HEADERS, "cache-control": "no-store"})
    return response


_HANDLERS = [index, static, book_, stamp, runs, episodes, groups, failures, losses, episode, group, tokens, canned, sql]


def make_router(page: Page) -> Router:
    """The page's routes, for the application of a server."""
    assets = read_assets()
    return Router(
        PATH,
        route_handlers=_HANDLERS,
        dependencies={
            "page": Provide(lambda: page, sync_to_thread=False),
            "assets": Provide(lambda: assets, sync_to_thread=False),
        },
        response_headers=_HEADERS,
        exception_handlers={Exception: _refuse},
    )


def page_of(service: Service, name: str) -> Router:
    """The page of the book that a service writes, for its admin."""
    page = Page(lambda: service.book, service.sessions.require_admin, name=name, tokenizer=service.tokenizer)
    return make_router(page)


# A book that nobody serves


def _only(token: str) -> Callable[[str | None], None]:
    def require(key: str | None) -> None:
        if key is None:
            raise Unauthorized("this page needs its key; open the address that `rollbook view` printed")
        if not secrets.compare_digest(key.encode(), token.encode()):
            raise Forbidden("the key is not the one of this start; open the address that `rollbook view` printed")

    return require


@asynccontextmanager
async def viewing(
    book_path: Path, *, host: str = "127.0.0.1", port: int = 0, tokenizer: str | None = None
) -> AsyncIterator[str]:
    """Show a book to whoever has the address that this gives; its fragment is the key.

    tokenizer: a model folder, for runs whose own is not here. Raises ConfigError, StoreError, OSError.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"`rollbook view` listens on this machine only, got host {host}; "
            "from elsewhere use `ssh -L`, or `rollbook serve`"
        )
    spelling = Tokenizer.load(tokenizer) if tokenizer else None
    token = secrets.token_urlsafe(24)
    with open_book(book_path) as book:
        app = Litestar(
            [make_router(Page(lambda: book, _only(token), name=str(book_path), tokenizer=spelling))],
            exception_handlers={Exception: _refuse},
            openapi_config=None,
            logging_config=None,
        )
        listening = bind(host, port)
        try:
            async with listen(app, listening, max_header_bytes=32 << 10, stop_s=2) as url:
                yield f"{url}{PATH}/#key={token}"
        finally:
            listening.close()


def view_book(book_path: Path, *, host: str, port: int, tokenizer: str | None, announce: Callable[[str], None]) -> None:
    """Show a book until SIGINT or SIGTERM; `announce` is told the address. Raises as `viewing` does."""

    async def show() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with viewing(book_path, host=host, port=port, tokenizer=tokenizer) as url:
                announce(url)
                async for _ in signals:
                    return

    anyio.run(show)
