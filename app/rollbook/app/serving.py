"""`rollbook serve`: a book, an engine and the proxy's surface, put together and kept up until stopped."""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console
from rich.text import Text

from rollbook.agents.workflow import load
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.engine import Engine
from rollbook.proxy.listener import bind
from rollbook.proxy.scripted import ScriptedEngine
from rollbook.proxy.server import Service, serve_until_stopped
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import Book, BookBusy, BookNotFound, Event, RunStarted, open_book

from .config import ConfigError, put, scalar
from .launch import ADMIN_KEY
from .models import ModelUnavailable, prepare_model
from .web import PATH, page_of


def serve_book(
    book_path: Path,
    *,
    engine: str,
    model: str,
    weights: str | None,
    version: int,
    script: str | None,
    run_id: str,
    host: str,
    port: int,
    threads: int,
    settings: Sequence[str],
    address_file: Path | None,
    writer: str = "proxy",
    engine_url: str | None = None,
    engine_python: str | None = None,
    engine_args: Sequence[str] = (),
) -> None:
    """Serve until SIGINT or SIGTERM. `address_file` gets {url, pid} once the server answers.

    engine_url: of a vLLM or SGLang that runs already; without it one is started, by the interpreter `engine_python`
        with the flags `engine_args`, and supervised.
    """
    config = _serve_config(settings, host=host, port=port, run_id=run_id, admin_key=os.environ.get(ADMIN_KEY))
    model_path = str(prepare_model(model))
    try:
        tokenizer = Tokenizer.load(model_path)
    except ValueError as error:
        raise ModelUnavailable(f"the model folder {model_path} cannot be used: {error}") from error
    answers = make_engine(
        engine,
        model_path,
        weights=weights,
        version=version,
        script=script,
        threads=threads,
        tokenizer=tokenizer,
        url=engine_url,
        python=engine_python,
        args=engine_args,
    )
    bind(config.host, config.port).close()  # what cannot listen leaves no empty book behind
    with open_writer(book_path, writer) as book:
        if not book.sql("select 1 from runs where run_id = ?", [run_id]).num_rows:
            # Nobody else says so: whoever reads the book later can spell the run's tokens.
            started = RunStarted(name=run_id, config={"engine": engine, "model": model_path})
            book.log.append_blocking(Event(run_id=run_id, fact=started))
        service = Service(log=book.log, engine=answers, tokenizer=tokenizer, config=config, book=book)

        def announce(url: str) -> None:
            if address_file is not None:
                beside = address_file.with_suffix(".part")
                beside.write_text(json.dumps({"url": url, "pid": os.getpid()}))
                beside.replace(address_file)
            else:
                _say(url, book_path, service.admin_key if config.admin_key is None else None)

        program = partial(serve_until_stopped, service, announce=announce, routes=[page_of(service, str(book_path))])
        anyio.run(program, backend_options={"use_uvloop": True})


def open_writer(book_path: Path, name: str) -> Book:
    """Open a book to append under `name`, or `name-2`, ... where other live processes already have the earlier ones."""
    if book_path.exists() and not book_path.is_dir():
        raise BookNotFound(f"{book_path} is a file, and a book is a folder; name one, which is made if it is not there")
    for i in range(1, 1000):
        try:
            return open_book(str(book_path), writer=name if i == 1 else f"{name}-{i}")
        except BookBusy:
            continue
    raise BookBusy(f"{book_path}: 999 writers called {name} are open; stop some of them")


def _serve_config(settings: Sequence[str], **given: Any) -> ServeConfig:
    tree: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"expected --set a.b=c, got {setting!r}")
        put(tree, key, scalar(value))
    try:
        return msgspec.convert(tree, ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {error}; known: {', '.join(ServeConfig.__struct_fields__)}") from error


def make_engine(
    kind: str,
    model: str,
    *,
    version: int,
    tokenizer: Tokenizer,
    weights: str | None = None,
    script: str | None = None,
    threads: int | None = None,
    url: str | None = None,
    python: str | None = None,
    args: Sequence[str] = (),
) -> Engine:
    """The engine called `kind`, not started. Raises ConfigError for what it would need and was not given."""
    if kind == "scripted":
        if script is None:
            raise ConfigError("the scripted engine needs --script MODULE:FUNCTION, which says what it answers")
        return ScriptedEngine(load(script, "script")(tokenizer), version=version)
    if kind == "embedded":
        from rollbook.proxy.embedded import EmbeddedEngine

        return EmbeddedEngine(weights or model, version=version, threads=threads)
    if kind == "vllm":
        from rollbook.proxy.vllm import VLLMEngine

        return VLLMEngine(model, weights=weights, version=version, url=url, python=python, args=args)
    if kind == "sglang":
        from rollbook.proxy.sglang import SGLangEngine

        return SGLangEngine(model, weights=weights, version=version, url=url, python=python, args=args)
    raise ConfigError(f"there is no engine {kind!r}; expected embedded, scripted, vllm or sglang")


def _say(url: str, book_path: Path, admin_key: str | None) -> None:
    out = Console(highlight=False)
    out.print(
        Text.assemble(
            "Recording into ", (str(book_path), "bold"), ", answering at ", (f"{url}/v1", "bold"), " (stop with Ctrl-C)"
        ),
        soft_wrap=True,
    )
    if admin_key is not None:
        out.print(f"Admin key of this start: {admin_key}\nOpen a session for an agent:")
        out.print(
            f"  curl -s {url}/rl/start_session -H 'Authorization: Bearer {admin_key}' -d '{{\"task_id\": \"hello\"}}'",
            soft_wrap=True,
        )
        out.print(
            f"and give the agent OPENAI_BASE_URL={url}/v1 and the answer's api_key as OPENAI_API_KEY.", soft_wrap=True
        )
        out.print(f"Look at the book at {url}{PATH}/#key={admin_key}", soft_wrap=True)
