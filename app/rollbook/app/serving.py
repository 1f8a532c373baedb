"""`rollbook serve`: a book, an engine and the proxy's surface, put together and kept up until stopped."""

import inspect
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
from rich.console import Console
from rich.text import Text

from rollbook.agents.naming import load
from rollbook.proxy.bodies import Weights
from rollbook.proxy.capture import CaptureSettings
from rollbook.proxy.config import ServeConfig
from rollbook.proxy.engine import Engine
from rollbook.proxy.front import Shared
from rollbook.proxy.listener import bind
from rollbook.proxy.permits import Permits
from rollbook.proxy.replicas import Replicas, Update
from rollbook.proxy.scripted import Script, ScriptedEngine, check_script
from rollbook.proxy.server import Service, check_admin_key, serve_until_stopped
from rollbook.proxy.tokenizer import Tokenizer
from rollbook.store import Book, BookBusy, BookNotFound, Event, RunStarted, open_book

from .config import ConfigError, put, scalar
from .keeper import write
from .launch import ADMIN_KEY, LaunchFailed
from .launch_local import LocalLauncher
from .models import ModelUnavailable, prepare_model
from .web import PATH, page_of

SERVED = ("vllm", "sglang")
"""Engines that are servers of their own."""


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
    engine_urls: Sequence[str] = (),
    engine_python: str | None = None,
    engine_args: Sequence[str] = (),
    replicas: int = 1,
    update: Update = "rolling",
    shared: Shared | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `address_file` gets {url, pid} once the server answers.

    engine_urls: of vLLMs or SGLangs that run already; without them `replicas` are started, by the interpreter
        `engine_python` with the flags `engine_args`, and supervised.
    """
    config, capture = _serve_config(settings, host=host, port=port, run_id=run_id, admin_key=os.environ.get(ADMIN_KEY))
    try:
        check_admin_key(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    model_path = str(prepare_model(model))
    try:
        tokenizer = Tokenizer.load(model_path)
    except ValueError as error:
        raise ModelUnavailable(f"the model folder {model_path} cannot be used: {error}") from error
    if shared is not None and shared.weights.exists():  # the others have these by now
        newest = msgspec.json.decode(shared.weights.read_bytes(), type=Weights)
        weights, version = newest.path, newest.version
    answers = make_engines(
        engine,
        model_path,
        urls=engine_urls,
        replicas=replicas,
        update=update,
        weights=weights,
        version=version,
        script=script,
        threads=threads,
        tokenizer=tokenizer,
        python=engine_python,
        args=engine_args,
    )
    bind(config.host, config.port).close()  # what cannot listen leaves no empty book behind
    with open_writer(book_path, writer) as book:
        if not book.sql("select 1 from runs where run_id = ?", [run_id]).num_rows:
            # Nobody else says so: whoever reads the book later can spell the run's tokens.
            started = RunStarted(name=run_id, config={"engine": engine, "model": model_path})
            book.log.append_blocking(Event(run_id=run_id, fact=started))
        permits = None if shared is None else Permits(config.permit_s, shared.peers.with_name("permits"))
        service = Service(
            log=book.log,
            engine=answers,
            tokenizer=tokenizer,
            config=config,
            capture=capture,
            book=book,
            permits=permits,
        )

        def announce(url: str) -> None:
            if address_file is not None:
                beside = address_file.with_suffix(".part")
                beside.write_text(json.dumps({"url": url, "pid": os.getpid()}))
                beside.replace(address_file)
            if address_file is None or config.admin_key is None:  # nobody else knows a key that was made here
                _say(url, book_path, service.admin_key if config.admin_key is None else None)

        program = partial(
            serve_until_stopped,
            service,
            announce=announce,
            routes=[page_of(service, str(book_path))],
            shared=shared,
        )
        anyio.run(program, backend_options={"use_uvloop": True})


def serve_workers(
    book_path: Path, n: int, *, arguments: Sequence[str], host: str, port: int, address_file: Path | None
) -> None:
    """`n` servers of one book behind one address, until SIGINT or SIGTERM; one that dies is started again.

    arguments: of `rollbook serve`, without the address. `address_file` gets {url, urls, pid}: the shared address, and
    each worker's own.
    """
    admin_key = os.environ.get(ADMIN_KEY)
    key = admin_key or "sk-rb-admin-" + secrets.token_urlsafe(32)
    holder = hold(host, port)
    port = holder.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="rollbook-workers-") as folder, LocalLauncher() as launcher:
        peers = Path(folder, "peers.json")
        command = [sys.executable, "-m", "rollbook.app.cli", "serve", str(book_path), *arguments]
        command += ["--host", host, "--writer", "proxy-{index}", "--front", f"{port}:{{index}}:{peers}"]
        programs = launcher.start(command, n=n, env={ADMIN_KEY: key}, log_path=Path(folder, "worker.log"))
        write(peers, json.dumps([program.url for program in programs]))
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        wait_until_served(url)
        holder.close()
        stopping = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # only now: while we wait for workers, either ends us there
            signal.signal(number, lambda *_: stopping.set())
        if address_file is not None:
            write(address_file, json.dumps({"url": url, "urls": [p.url for p in programs], "pid": os.getpid()}))
        else:
            _say(url, book_path, key if admin_key is None else None)
        while not stopping.wait(1.0):
            for program in programs:
                program.check()


def hold(host: str, port: int) -> socket.socket:
    """A port that stays ours until the workers listen on it; it takes no connections itself. Raises OSError."""
    bind(host, port).close()  # nobody else has it
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((host, port))
    return holder


def shared_of(text: str | None) -> Shared | None:
    """`PORT:INDEX:FILE`, as `serve_workers` tells each worker."""
    if text is None:
        return None
    port, index, peers = text.split(":", 2)
    return Shared(int(port), Path(peers), int(index) - 1)


def wait_until_served(url: str) -> None:
    """Until the workers listen on their shared address."""
    give_up = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"{url}/health", timeout=5, trust_env=False)
            return
        except httpx.TransportError as error:
            if time.monotonic() > give_up:
                raise LaunchFailed(f"no worker listens on {url}: {error}") from error
        time.sleep(0.05)


def open_writer(book_path: Path, name: str) -> Book:
    """Open a book to append under `name`, or `name-2`, ... where other live processes already have the earlier ones."""
    if book_path.exists() and not book_path.is_dir():
        raise BookNotFound(f"{book_path} is a file, and a book is a folder; name one, which is made if it is not there")
    for i in range(1, 1000):
        try:
            return open_book(str(book_path), writer=name if i == 1 else f"{name}-{i}")
        except BookBusy:
            continue
        except ValueError as error:
            raise ConfigError(f"--writer: {error}") from error
    raise BookBusy(f"{book_path}: 999 writers called {name} are open; stop some of them")


def _serve_config(settings: Sequence[str], **given: Any) -> tuple[ServeConfig, CaptureSettings]:
    """Of `--set a.b=c`: the server's settings, and under `capture` how prompts are made and replies read."""
    tree: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"expected --set a.b=c, got {setting!r}")
        put(tree, key, scalar(value))
    capture = tree.pop("capture", {})
    type_: type[ServeConfig] | type[CaptureSettings] = ServeConfig
    try:
        config = msgspec.convert(tree, ServeConfig)
        type_ = CaptureSettings
        return config, msgspec.convert({"model": config.model} | msgspec.convert(capture, dict), CaptureSettings)
    except msgspec.ValidationError as error:
        known = ", ".join(f"capture.{name}" if type_ is CaptureSettings else name for name in type_.__struct_fields__)
        raise ConfigError(f"--set: {error}; known: {known}") from error


def make_engines(
    kind: str,
    model: str,
    *,
    urls: Sequence[str] = (),
    replicas: int = 1,
    update: Update = "rolling",
    args: Sequence[str] = (),
    **settings: Any,
) -> Engine:
    """One engine, or several behind one seam: those at `urls`, else `replicas` of our own. See `make_engine`."""
    if replicas < 1:
        raise ConfigError(f"--replicas must be at least 1, got {replicas}")
    if urls and kind not in (*SERVED, "openai"):
        raise ConfigError(
            f"--engine-url is the address of a server that runs (--engine vllm, sglang or openai); --engine is {kind}"
        )
    if urls:
        engines = [make_engine(kind, model, url=url, args=args, **settings) for url in urls]
    elif kind in SERVED:
        places = gpus_of(replicas, args)
        engines = [make_engine(kind, model, env=place, args=args, **settings) for place in places]
    else:
        engines = [make_engine(kind, model, args=args, **settings) for _ in range(replicas)]
    return engines[0] if len(engines) == 1 else Replicas(engines, update=update)


def gpus_of(replicas: int, args: Sequence[str]) -> list[dict[str, str]]:
    """For each of several servers the variable that gives it GPUs of its own: as many as its flags split a model over.

    Of the GPUs that we may use, where CUDA_VISIBLE_DEVICES says so. Raises ConfigError if there are too few of them.
    """
    if replicas == 1:
        return [{}]
    each = 1
    for i, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name in ("--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--pipeline-parallel-size", "-pp"):
            each *= int(value if equals else args[i + 1])
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    ours = listed.split(",") if listed else [str(i) for i in range(replicas * each)]
    if len(ours) < replicas * each:
        raise ConfigError(
            f"{replicas} engines of {each} GPUs need {replicas * each}, and CUDA_VISIBLE_DEVICES has {len(ours)}: "
            f"{listed}"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(ours[i * each : (i + 1) * each])} for i in range(replicas)]


def _script(named: str, tokenizer: Tokenizer) -> Script:
    """The script that a function of that name makes. Raises ConfigError where it makes none."""
    make = load(named, "script")
    try:
        inspect.signature(make).bind(tokenizer)
    except TypeError:
        raise ConfigError(
            f"expected {named} to take the tokenizer and return the script, a function of a Generation; it takes "
            f"{inspect.signature(make)}"
        ) from None
    try:
        return check_script(make(tokenizer), named)
    except ValueError as error:
        raise ConfigError(str(error)) from error


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
    env: Mapping[str, str] | None = None,
) -> Engine:
    """The engine called `kind`, not started. Raises ConfigError for what it would need and was not given."""
    if version < 0:
        raise ConfigError(f"--weights-version must be at least 0, got {version}")
    if kind == "scripted":
        if script is None:
            raise ConfigError("the scripted engine needs --script FILE.py:FUNCTION, which says what it answers")
        return ScriptedEngine(_script(script, tokenizer), version=version)
    if kind == "embedded":
        from rollbook.proxy.embedded import EmbeddedEngine

        return EmbeddedEngine(weights or model, version=version, threads=threads)
    if kind == "vllm":
        from rollbook.proxy.vllm import VLLMEngine

        return VLLMEngine(model, weights=weights, version=version, url=url, python=python, args=args, env=env)
    if kind == "sglang":
        from rollbook.proxy.sglang import SGLangEngine

        return SGLangEngine(model, weights=weights, version=version, url=url, python=python, args=args, env=env)
    if kind == "openai":
        from rollbook.proxy.compatible import CompatibleEngine

        if url is None:
            raise ConfigError("the engine 'openai' is a server that runs already: give --engine-url URL")
        return CompatibleEngine(model, url=url, version=version)
    raise ConfigError(f"there is no engine {kind!r}; expected embedded, scripted, vllm, sglang or openai")


def _say(url: str, book_path: Path, admin_key: str | None) -> None:
    out = Console(highlight=False, markup=False, emoji=False)
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
