"""Runs every block of the documents named, in order, in a folder with a recorded book.

    python tests/docs_blocks.py FOLDER PAGE...

A block's language says what it is: bash (each command), python, yaml (a whole config where its first line names a file,
else sections of one), sql (on the book), json. text is only read; console needs more than this machine, and says what.
A block whose first line is `# name.ext` is that file. Prints one JSON object: what failed, by page. `rollbook`
commands run in this process, so that its packages are imported once; a server runs beside it, on a free port.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import anyio
import yaml

ROOT = Path(__file__).parents[1]
AGENT = """
from openai import AsyncOpenAI

class MathAgent:
    async def run(self, data, base_url=None, api_key=None, **extra_kwargs):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            answer = await client.chat.completions.create(model="default", messages=data["messages"])
        return float(data["answer"] in (answer.choices[0].message.content or ""))
"""
RUNS = {"bash", "python", "yaml", "sql", "json"}
SHOWN = {"text", "console", "jinja"}
_ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(line, language, code) of every fenced block."""
    text = page.read_text()
    found = re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text[: m.start()].count("\n") + 1, m[1], m[2]) for m in found]


class Workspace:
    """The folder that blocks run in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[subprocess.Popen[str]] = []
        self.url = ""

    def prepare(self) -> None:
        """A model, an agent, and a book of four groups of four episodes by a scripted engine."""
        from rollbook.app.models import prepare_model

        os.chdir(self.folder)
        sys.path.insert(0, "")
        model = prepare_model("tiny")
        Path("MODEL").symlink_to(model)
        Path("runs/demo").mkdir(parents=True)
        Path("BOOK").symlink_to("runs/demo/book")
        Path("my_agent.py").write_text(AGENT)
        Path("test.jsonl").write_text('{"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}\n')
        anyio.run(_record, model)

    def run(self, language: str, code: str) -> None:
        """Raises whatever is wrong."""
        first, _, rest = code.partition("\n")
        named = re.fullmatch(r"# ([\w./-]+\.(?:py|yaml|jsonl))\b.*", first)
        if named:
            Path(named[1]).write_text(self._here(rest))
            sys.modules.pop(Path(named[1]).stem, None)
        if language == "yaml":
            self._config(code, named[1] if named else None)
        elif language == "json":
            json.loads(code)
        elif language == "sql":
            from rollbook.store import open_book

            with open_book("BOOK") as book:
                book.sql(code)
        elif language == "python" and not (named and "asyncio.run(" in code):
            exec(compile(self._here(code), "block", "exec"), {"__name__": "block"})
        elif language == "bash":
            for command in re.sub(r"\\\n\s*", " ", code).splitlines():
                self._command(command)

    def _config(self, code: str, name: str | None) -> None:
        from rollbook.app.config import load_config

        if "scrape_configs" in code:
            yaml.safe_load(code)
            return
        Path("block.yaml").write_text(code)
        load_config(name or "block.yaml")

    def _here(self, text: str) -> str:
        return _ADDRESS.sub(self.url, text) if self.url else text

    def _command(self, line: str) -> None:
        words = shlex.split(line, comments=True)
        if not words:
            return
        if words[0] == "export":
            for word in words[1:]:
                name, _, value = word.partition("=")
                os.environ[name] = value
        elif words[0].endswith("rollbook") and words[1] in ("serve", "view"):
            self._serve([*words[1:], "--port", "0"])
        elif words[0].endswith("rollbook"):
            from rollbook.app.cli import main

            main(words[1:])
        else:
            done = subprocess.run(["bash", "-ec", self._here(line)], capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(done.stdout + done.stderr)

    def _serve(self, words: list[str]) -> None:
        address = self.folder / f"address-{len(self.servers)}.json"
        command = [sys.executable, "-m", "rollbook.app.cli", *words]
        if words[0] == "serve":
            command += ["--address-file", str(address)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.servers.append(server)
        if words[0] == "view":
            assert server.stdout is not None
            said = [server.stdout.readline() for _ in range(2)]
            if "http://" not in said[-1]:
                raise AssertionError("".join(said))
            return
        while not address.exists():
            if server.poll() is not None:
                raise AssertionError(f"{words} ended with {server.returncode}: {server.communicate()[0]}")
            time.sleep(0.05)
        self.url = json.loads(address.read_text())["url"]

    def stop(self) -> None:
        """End what a page has started."""
        for server in self.servers:
            server.terminate()
            server.communicate(timeout=600)
        self.servers.clear()
        self.url = ""


async def _record(model: Path) -> None:
    from rollbook.agents.data import tasks_of
    from rollbook.agents.runner import Runner
    from rollbook.proxy.client import ProxyClient
    from rollbook.proxy.config import GenerationHyperparameters, ServeConfig
    from rollbook.proxy.scripted import ScriptedEngine
    from rollbook.proxy.server import Service, serve
    from rollbook.proxy.tokenizer import Tokenizer
    from rollbook.store import Event, PolicyPublished, RunStarted, open_book

    spelled = Tokenizer.load(str(model))
    n = 0

    def answers(generation: Any) -> list[int]:
        nonlocal n
        n += 1
        return [*spelled.encode(f"It is {7 + n % 3}.").tolist(), spelled.eos_ids[0]]

    rows = [{"messages": [{"role": "user", "content": f"What is {a} + {7 - a}?"}], "answer": "7"} for a in (1, 2, 3, 4)]
    with open_book("runs/demo/book", writer="proxy") as book:
        await book.log.append(
            Event(run_id="demo", fact=RunStarted(name="demo")),
            Event(run_id="demo", fact=PolicyPublished(version=0, path=str(model))),
        )
        config = ServeConfig(run_id="demo", gconfig=GenerationHyperparameters(max_new_tokens=16))
        service = Service(log=book.log, engine=ScriptedEngine(answers), tokenizer=spelled, config=config, book=book)
        async with serve(service) as url, ProxyClient(url, service.admin_key) as client:
            await Runner(client, "my_agent.MathAgent", run_id="demo", n_samples=4).run(tasks_of(rows))


def main(folder: Path, pages: list[Path]) -> None:
    workspace = Workspace(folder)
    workspace.prepare()
    failed: dict[str, list[str]] = {}
    for page in pages:
        for line, language, code in blocks(page):
            if language not in RUNS:
                continue
            told = io.StringIO()
            try:
                with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                    workspace.run(language, code)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                last = "" if isinstance(error, SystemExit) else "".join(traceback.format_exception(error)[-6:])
                failed.setdefault(page.name, []).append(f"line {line} ({language}): {last}{told.getvalue()[-2000:]}")
        workspace.stop()
    print(json.dumps(failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name).resolve() for name in sys.argv[2:]])
