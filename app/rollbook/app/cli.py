"""The command line: every command is one function; an error that a person can act on is one sentence and status 1."""

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import duckdb
from rich.console import Console
from rich.text import Text

from rollbook.agents.errors import AgentsError
from rollbook.learner.errors import LearnerError
from rollbook.proxy.errors import ProxyError
from rollbook.store import Book, StoreError, __version__, open_book, plan_prune, prune

from .config import ConfigError
from .launch import LaunchFailed
from .models import ModelUnavailable

Command = Callable[[argparse.Namespace], None]

# What is piped is not folded. No markup: names of files, columns and runs may have brackets and colons.
out = Console(width=None if sys.stdout.isatty() else 10_000, markup=False, emoji=False)
err = Console(stderr=True, markup=False, emoji=False)


class Stop(Exception):
    """A command cannot go on; the message is for the person."""


def _refuse_none(args: argparse.Namespace, *names: str) -> None:
    """Raises Stop for a number of things that is below 1."""
    for name in names:
        number = getattr(args, name)
        if number is not None and number < 1:
            raise Stop(f"--{name} must be at least 1, got {number}")


def _serve(args: argparse.Namespace) -> None:
    from .serving import serve_book, serve_workers, shared_of

    _refuse_none(args, "workers", "threads")
    if args.workers > 1:
        serve_workers(
            Path(args.book),
            args.workers,
            arguments=_of_each_worker(args),
            host=args.host,
            port=args.port,
            address_file=Path(args.address_file) if args.address_file else None,
        )
        return
    serve_book(
        Path(args.book),
        engine=args.engine,
        model=args.model,
        weights=args.weights,
        version=args.weights_version,
        script=args.script,
        run_id=args.run,
        host=args.host,
        port=args.port,
        threads=args.threads,
        settings=args.set,
        address_file=Path(args.address_file) if args.address_file else None,
        writer=args.writer,
        engine_urls=args.engine_url,
        replicas=args.replicas,
        update=args.update,
        shared=shared_of(args.front),
        engine_python=args.engine_python,
        engine_args=shlex.split(args.engine_args),
    )


def _of_each_worker(args: argparse.Namespace) -> list[str]:
    """The words of `rollbook serve` for one of several that share its address."""
    words = ["--engine", args.engine, "--model", args.model, "--run", args.run]
    words += ["--weights-version", str(args.weights_version), "--replicas", str(args.replicas), "--update", args.update]
    words += ["--threads", str(max(1, args.threads // args.workers)), f"--engine-args={args.engine_args}"]
    for name in ("weights", "script", "engine_python"):
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", getattr(args, name)]
    return [*words, *(f"--engine-url={url}" for url in args.engine_url), *(f"--set={one}" for one in args.set)]


def _train(args: argparse.Namespace) -> None:
    from .training import train

    train(args.config, args.overrides)


def _eval(args: argparse.Namespace) -> None:
    import yaml

    from rollbook.agents.config import AgentConfig
    from rollbook.agents.data import get_custom_dataset
    from rollbook.agents.modes import workflow_of

    from .evaluation import evaluate

    sys.path.insert(0, os.getcwd())
    words = shlex.split(args.agent) if args.mode == "command" else None
    config = AgentConfig(mode=args.mode, command=words, subproc_max_workers=args.workers)
    kwargs = {name: yaml.safe_load(value) for name, _, value in (given.partition("=") for given in args.arg)}
    workflow = workflow_of(config, args.agent, kwargs)
    rows = list(get_custom_dataset(path=args.data))[: args.limit]
    book_path = Path(args.book)
    with closing(workflow):
        evaluate(
            book_path,
            workflow,
            rows,
            run_id=args.run,
            serve_args=_engine_args(args),
            n_samples=args.samples,
            time_limit_s=args.time_limit,
        )
    with open_book(book_path) as book:
        _print_evaluation(book, args)


def _print_evaluation(book: Book, args: argparse.Namespace) -> None:
    from .evaluation import summary
    from .reading import print_table

    measures, tasks = summary(book, args.run, n_samples=args.samples, solved_at=args.solved_at)
    failed = book.sql(
        "select reason, count(*) as episodes from episodes where run_id = ? and is_eval and state = 'failed' "
        "group by reason order by episodes desc limit 5",
        [args.run],
    )
    print_table(measures, args.format, out)
    if args.format == "table":
        print_table(tasks.slice(0, 20), "table", out)
        if failed.num_rows:
            out.print("Failed episodes count as not solved:")
            print_table(failed, "table", out)


def _engine_args(args: argparse.Namespace, policy: Sequence[str] = ()) -> list[str]:
    """What `serve` needs to answer with `--model`: a folder, a name, a policy of a book, or a vLLM at a URL; without
    it, with `policy`."""
    from .evaluation import policy_args

    if args.model is None:
        serve_args = [*policy]
    elif args.model.startswith(("http://", "https://")):
        if args.served_model is None:
            raise Stop("a vLLM at a URL needs --served-model DIR, the folder of the model that it serves")
        serve_args = ["--engine", "vllm", "--engine-url", args.model, "--model", args.served_model]
    elif args.policy_of:
        try:
            serve_args = policy_args(Path(args.policy_of), args.model)
        except ValueError as error:
            raise Stop(str(error)) from error
    else:
        serve_args = ["--model", args.model]
    if args.script:
        serve_args += ["--engine", "scripted", "--script", args.script]
    for setting in args.set:
        serve_args += ["--set", setting]
    return serve_args


def _fork(args: argparse.Namespace) -> None:
    from rollbook.agents.workflow import resolve

    from .fork import fork, todays_policy
    from .reading import find_interaction

    sys.path.insert(0, os.getcwd())
    if args.agent is not None:
        resolve(args.agent)
    with open_book(args.book) as book:
        origin = find_interaction(book, args.interaction)
        policy = todays_policy(book, origin) if args.model is None else []
    group_id, episodes = fork(
        Path(args.book),
        origin,
        args.agent,
        serve_args=_engine_args(args, policy),
        run_id=args.run,
        n=args.n,
    )
    done = [one for one in episodes if one.state == "done"]
    rewards = [one.reward for one in done if one.reward is not None]
    said = (
        f"rewards {min(rewards):g} to {max(rewards):g}" if rewards else "no rewards yet: `rollbook reward` gives them"
    )
    out.print(
        f"{len(done)} of {len(episodes)} samples from {origin} are done, group {group_id} of run {args.run}; {said}",
        highlight=False,
        soft_wrap=True,
    )
    failed = next((one.reason for one in episodes if one.state == "failed"), None)
    if failed is not None:
        raise Stop(f"{len(episodes) - len(done)} samples failed, the first: {failed}")


def _sql(args: argparse.Namespace) -> None:
    from .reading import open_for_reading, print_table, query

    if args.query is None and not args.questions and sys.stdin.isatty() and sys.stdout.isatty():
        from .terminal.repl import Repl

        with open_for_reading(args.book) as book:
            Repl(book, out, format=args.format).loop()
        return
    statement = sys.stdin.read() if args.query == "-" else args.query
    table = query(args.book, statement, args.params)
    print_table(table, args.format, out, Path(args.output) if args.output else None)


def _reward(args: argparse.Namespace) -> None:
    from rich.progress import Progress

    from .rereward import reward_by_function, reward_by_sql

    if args.sql:
        outcome = reward_by_sql(args.book, args.judge, name=args.name, where=args.where)
    else:
        with Progress(console=err, transient=True) as bar:
            task = bar.add_task("judging")
            outcome = reward_by_function(
                args.book,
                args.judge,
                name=args.name,
                where=args.where,
                processes=args.processes,
                timeout_s=args.timeout,
                retries=args.retries,
                concurrency=args.concurrency,
                rate_per_s=args.rate,
                batch=args.batch,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    if args.json:
        print(json.dumps({"name": args.name, **vars(outcome)}))
        return
    pruned = f", {outcome.n_pruned} left out since they were pruned" if outcome.n_pruned else ""
    out.print(
        f"{outcome.n_judged} episodes judged as {args.name!r} by {outcome.source}; {outcome.n_no_opinion} without an "
        f"opinion, {outcome.n_failed} failed (table `failures`), {outcome.n_skipped} judged by it before{pruned}",
        highlight=False,
    )


def _rewards(args: argparse.Namespace) -> None:
    from .reading import open_for_reading, print_table
    from .rereward import difference

    with open_for_reading(args.book) as book:
        print_table(difference(book, args.old, args.new), args.format, out)


def _replay(args: argparse.Namespace) -> None:
    from .models import tokenizer_folder
    from .playback import replay
    from .reading import find_episode

    sys.path.insert(0, os.getcwd())
    with open_book(args.book) as book:
        episode = find_episode(book, args.episode)
        try:
            played = replay(book, episode, args.workflow, tokenizer=tokenizer_folder(args.tokenizer))
        except ValueError as error:  # no dataset row, or no tokenizer there
            raise Stop(str(error)) from error
    n = len(played.again.interactions)
    if not played.is_same or played.failure:
        what = f"{played.n_unasked} recorded calls were not made, or a reply was read otherwise"
        what = played.divergence or (f"the agent failed: {played.failure}" if played.failure else what)
        raise Stop(f"{n} calls went as recorded, then: {what}")
    out.print(
        f"{n} calls went as recorded, answered without a model; reward {played.again.row['reward']} "
        f"(recorded {played.episode.row['reward']})"
    )


def _rescore(args: argparse.Namespace) -> None:
    from rich.progress import Progress

    from .models import prepare_model
    from .rescore import rescore

    model = prepare_model(args.model, renders=False)
    with Progress(console=err, transient=True) as bar:
        task = bar.add_task("scoring")
        done = rescore(
            args.book,
            model,
            name=args.name,
            where=args.where,
            dtype=args.dtype,
            device=args.device,
            max_tokens=args.max_tokens,
            progress=lambda n, total: bar.update(task, completed=n, total=total),
        )
    gap = f"; mean gap to the recorded logprobs {done.mean_gap:.4f} nats per token" if done.n_tokens else ""
    out.print(
        f"{done.n_scored} answers of {done.n_tokens} tokens scored as {done.name!r} by weights "
        f"{done.weights_sha256[:12]}, {done.n_skipped} scored by them before{gap} (view `scores`)",
        highlight=False,
        soft_wrap=True,
    )


def _view(args: argparse.Namespace) -> None:
    from .web import view_book

    def announce(url: str) -> None:
        out.print(f"Showing {args.book} (stop with Ctrl-C); the address has this start's key:", highlight=False)
        out.print(url, highlight=False, soft_wrap=True)

    view_book(Path(args.book), host=args.host, port=args.port, tokenizer=args.tokenizer, announce=announce)


def _lake(args: argparse.Namespace) -> None:
    from rollbook.store.lake import LakeLog, create_lake_book

    if args.catalogue is not None or args.data is not None:
        if args.catalogue is None or args.data is None:
            raise Stop("a lake is a --catalogue and a --data folder; give both")
        create_lake_book(args.book, args.catalogue, args.data)
        out.print(f"{args.book} is a book in the lake at {args.catalogue}, data in {args.data}", highlight=False)
    with closing(LakeLog(args.book)) as log:
        before = len(log.files())
        if args.compact:
            log.compact()
        out.print(f"{before} files" + (f", {len(log.files())} after merging" if args.compact else ""), highlight=False)


def _prune(args: argparse.Namespace) -> None:
    from .reading import find_ended

    episodes = find_ended(args.book, args.where)
    would = plan_prune(args.book, episode_ids=episodes)
    if not would.n_events and not would.n_unknown:
        out.print(f"nothing to prune: {len(episodes)} ended episodes are chosen, none of which has a payload left")
        return
    out.print(
        f"messages and tokens of {would.n_events} events of {len(episodes)} ended episodes "
        f"({would.payload_bytes / 1e6:.1f} MB before compression); ids, rewards, states and versions stay",
        highlight=False,
    )
    if would.n_begun:
        out.print(
            f"of these, {would.n_begun} events are of an earlier prune that did not come to its end", highlight=False
        )
    if would.n_unknown:
        out.print(
            f"and the tables learn of {would.n_unknown} interactions that an earlier version pruned", highlight=False
        )
    if args.dry_run:
        out.print("nothing was removed: this was a dry run")
        return
    if not args.yes:
        try:
            answer = input("Remove them for good? [y/N] ")
        except EOFError:
            raise Stop("nothing was removed: nobody is there to confirm it; give --yes if you mean it") from None
        if answer.strip().lower() not in ("y", "yes"):
            out.print("nothing was removed")
            return
    done = prune(args.book, episode_ids=episodes)
    out.print(
        f"removed from {done.n_events} events; files are {max(done.freed_bytes, 0) / 1e6:.1f} MB smaller",
        highlight=False,
    )
    if done.n_left:
        raise Stop(
            f"{done.n_left} events are in logs of processes that write to the book now; "
            "prune again when they have ended"
        )


def _demo(args: argparse.Namespace) -> None:
    from .demo import run

    _refuse_none(args, "threads", "steps")
    run(
        seed=args.seed,
        root=Path(args.dir),
        steps=args.steps,
        threads=args.threads,
        algorithm=args.algorithm,
        out=out,
    )


def _areal(args: argparse.Namespace) -> None:
    from .areal_compat import run

    if not Path(args.script).is_file():
        raise Stop(f"there is no script {args.script} (looked from {Path.cwd()})")
    run([args.script, *args.arguments])


class _Command(argparse.ArgumentParser):
    """One that takes options anywhere: argparse alone gives what is optional and has no dashes its default at the first
    option, and refuses the query of `sql BOOK --format csv QUERY`."""

    _is_within = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, argparse.Namespace(**vars(namespace or argparse.Namespace())))
        if not rest or self._is_within or any(a.nargs == argparse.REMAINDER for a in self._actions):
            return found, rest
        self._is_within = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_within = False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollbook",
        description="The trajectory database for agent RL: record model calls, reward with SQL, train from the book.",
        epilog="First: `rollbook demo` trains a small model on arithmetic; `rollbook COMMAND --help` explains one.",
    )
    parser.add_argument("--version", action="version", version=f"rollbook {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Command)

    def command(
        name: str, run: Callable[[argparse.Namespace], None], help_: str, example: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=help_,
            description=help_[0].upper() + help_[1:] + ".",
            epilog=f"Example: {example}",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        made.set_defaults(command=run)
        return made

    def book_of(made: argparse.ArgumentParser) -> None:
        made.add_argument("book", metavar="BOOK", help="the folder of the book")

    made = command(
        "serve",
        _serve,
        "record an agent's model calls: proxy and engine on one port",
        "rollbook serve runs/my-book --model smollm2-135m",
    )
    book_of(made)
    made.add_argument(
        "--engine",
        choices=["embedded", "scripted", "vllm", "sglang", "openai"],
        default="embedded",
        help="what answers",
    )
    made.add_argument("--model", default="smollm2-135m", help="a model folder, or smollm2-135m, or tiny")
    made.add_argument(
        "--engine-url",
        action="append",
        default=[],
        metavar="URL",
        help="of a server that runs already; several share the requests",
    )
    made.add_argument("--replicas", type=int, default=1, metavar="N", help="engines to start that share the requests")
    made.add_argument(
        "--update",
        choices=["rolling", "barrier"],
        default="rolling",
        help="new weights: one engine after the other, or all while none samples",
    )
    made.add_argument(
        "--engine-python", default=None, metavar="PATH", help="the interpreter that has vLLM or SGLang, if not this one"
    )
    made.add_argument(
        "--engine-args", default="", metavar="ARGS", help="flags for the server that is started, as one word"
    )
    made.add_argument("--weights", default=None, help="a folder of newer weights to start with")
    made.add_argument("--weights-version", type=int, default=0, metavar="N", help="the version that those weights are")
    made.add_argument("--script", default=None, metavar="FILE.py:FUNCTION", help="what the scripted engine says")
    made.add_argument("--run", default="default", help="the run that episodes belong to")
    made.add_argument("--host", default="127.0.0.1", help="where to listen")
    made.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    made.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of the embedded engine")
    made.add_argument(
        "--workers", type=int, default=1, metavar="N", help="servers that share the book and the address, one per core"
    )
    made.add_argument("--front", default=None, help=argparse.SUPPRESS)  # PORT:INDEX:FILE, from serve_workers
    made.add_argument(
        "--writer",
        default="proxy",
        metavar="NAME",
        help="under which name to append to the book; NAME-2 if it is taken",
    )
    made.add_argument("--address-file", default=None, metavar="FILE", help="write {url, pid} there once it answers")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help="a setting of the proxy, e.g. gconfig.temperature=0.7",
    )

    made = command(
        "train", _train, "train an agent by a config file", "rollbook train config.yaml actor.optimizer.lr=1e-5"
    )
    made.add_argument("config", metavar="CONFIG", help="a YAML file")
    made.add_argument("overrides", nargs="*", metavar="A.B=C", help="values that win over the file's")

    made = command("eval", _eval, "measure an agent on a dataset", "rollbook eval my_agent.MathAgent test.jsonl")
    made.add_argument(
        "agent", metavar="AGENT", help="my_agent.MathAgent or my_agent.py:MathAgent; a program in mode command"
    )
    made.add_argument("data", metavar="DATA", help="a .jsonl, .json or .parquet file, or module:function")
    made.add_argument("--model", default="smollm2-135m", help="a model folder or name, URL of a vLLM, or RUN[@VERSION]")
    made.add_argument("--mode", choices=["inline", "subproc", "command"], default="inline", help="how agents are run")
    made.add_argument("--workers", type=int, default=4, metavar="N", help="worker processes of mode subproc")
    made.add_argument("--arg", action="append", default=[], metavar="A=B", help="a keyword of the agent, as YAML")
    made.add_argument("--time-limit", type=float, default=600.0, metavar="S", help="a longer episode has failed")
    made.add_argument("--policy-of", default=None, metavar="BOOK", help="the book whose policy --model names")
    made.add_argument("--served-model", default=None, metavar="DIR", help="the folder of what the vLLM at URL serves")
    made.add_argument("--script", default=None, metavar="FILE.py:FUNCTION", help="let a scripted engine answer instead")
    made.add_argument("--book", default="runs/eval/book", help="where to record")
    made.add_argument("--run", default="eval", help="the run that the episodes belong to")
    made.add_argument("--samples", type=int, default=1, metavar="N", help="episodes per task; pass@k for k up to N")
    made.add_argument("--solved-at", type=float, default=1.0, metavar="R", help="reward from which a task is solved")
    made.add_argument("--limit", type=int, default=None, metavar="N", help="only the first N tasks")
    made.add_argument("--set", action="append", default=[], metavar="A.B=C", help="a proxy setting")
    made.add_argument("--format", choices=["table", "csv", "json"], default="table", help="as what")

    made = command(
        "sql",
        _sql,
        "ask a book a question in SQL",
        'rollbook sql runs/demo/book "from episodes"',
    )
    book_of(made)
    made.add_argument(
        "query", nargs="?", default=None, metavar="QUERY", help="SQL, a question's name, or - for stdin; none: a prompt"
    )
    made.add_argument("--questions", action="store_true", help="list the ready-made questions")
    made.add_argument("params", nargs="*", metavar="A=B", help="parameters of a question, e.g. run=demo/tools")
    made.add_argument(
        "--format", choices=["table", "csv", "json", "parquet", "arrow"], default="table", help="how to print"
    )
    made.add_argument("--json", action="store_const", dest="format", const="json", help="as --format json")
    made.add_argument("--output", "-o", default=None, metavar="FILE", help="write there instead of to the terminal")

    made = command(
        "reward",
        _reward,
        "give stored episodes new rewards",
        "rollbook reward runs/demo/book my_rewards.py:score --name v2",
    )
    book_of(made)
    made.add_argument("judge", metavar="JUDGE", help="FILE.py:FUNCTION, MODULE.FUNCTION, or with --sql an expression")
    made.add_argument("--name", required=True, help="the name of the reward; training takes it by `credit.reward`")
    made.add_argument("--sql", action="store_true", help="JUDGE is a SQL expression over the episodes table")
    made.add_argument("--where", default=None, metavar="SQL", help="only episodes for which this holds")
    made.add_argument("--processes", type=int, default=os.cpu_count(), help="judging at once")
    made.add_argument("--timeout", type=float, default=None, metavar="S", help="of one try, sync or async")
    made.add_argument("--concurrency", type=int, default=8, metavar="N", help="async judgements at once, per process")
    made.add_argument("--rate", type=float, default=None, metavar="N", help="tries that begin per second, in all")
    made.add_argument(
        "--batch",
        type=int,
        default=None,
        metavar="N",
        help="JUDGE takes lists of up to N, returns as many values",
    )
    made.add_argument("--retries", type=int, default=0, help="more tries for a judgement that fails")
    made.add_argument("--json", action="store_true", help="say what was done as JSON")

    made = command(
        "rewards", _rewards, "compare two rewards, task by task", "rollbook rewards runs/demo/book reward v2"
    )
    book_of(made)
    made.add_argument("old", metavar="OLD", help="the name of a reward")
    made.add_argument("new", metavar="NEW", help="the name of another")
    made.add_argument("--format", choices=["table", "csv", "json"], default="table", help="as what")
    made.add_argument("--json", action="store_const", dest="format", const="json", help="as --format json")

    made = command(
        "replay",
        _replay,
        "run an agent again on the record of an episode",
        "rollbook replay BOOK last my_agent.MathAgent",
    )
    book_of(made)
    made.add_argument("episode", metavar="EPISODE", help="an episode id or the beginning of one, or `last`")
    made.add_argument("workflow", metavar="AGENT", help="the agent: my_agent.MathAgent or my_agent.py:MathAgent")
    made.add_argument(
        "--tokenizer", required=True, metavar="MODEL", help="the model it was recorded with, as for serve"
    )

    made = command(
        "fork",
        _fork,
        "sample again from an interaction, with today's policy, as new episodes of its task",
        "rollbook fork BOOK last --n 8 --agent my_agent.MathAgent",
    )
    book_of(made)
    made.add_argument("interaction", metavar="INTERACTION", help="an interaction id or the beginning of one, or `last`")
    made.add_argument("--n", type=int, default=8, help="how many samples; they are one group")
    made.add_argument(
        "--agent", default=None, help="the agent, whose code goes on; without it the one request is asked again"
    )
    made.add_argument(
        "--model",
        default=None,
        help="a model folder or name, URL of a vLLM, or RUN[@VERSION]; default: the run's newest policy",
    )
    made.add_argument("--policy-of", default=None, metavar="BOOK", help="the book whose policy --model names")
    made.add_argument("--served-model", default=None, metavar="DIR", help="the folder of what the vLLM at URL serves")
    made.add_argument("--script", default=None, metavar="FILE.py:FUNCTION", help="let a scripted engine answer instead")
    made.add_argument("--run", default="fork", help="the run that the new episodes belong to")
    made.add_argument("--set", action="append", default=[], metavar="A.B=C", help="a proxy setting")

    made = command(
        "rescore",
        _rescore,
        "score stored answers by another checkpoint and write its logprobs beside the recorded ones",
        "rollbook rescore BOOK --model runs/other/saved/step-00000040 --name later",
    )
    book_of(made)
    made.add_argument("--model", required=True, metavar="CHECKPOINT", help="a model folder, or smollm2-135m, or tiny")
    made.add_argument("--name", default=None, help="of the scores; by default the folder's")
    made.add_argument("--where", default=None, metavar="SQL", help="only answers of episodes for which this holds")
    made.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the computing"
    )
    made.add_argument("--device", default="auto", help="auto takes the GPU if there is one")
    made.add_argument("--max-tokens", type=int, default=32768, metavar="N", help="computed at once")

    made = command(
        "view", _view, "show a book in the browser: curves, episodes, tokens, SQL", "rollbook view runs/demo/book"
    )
    book_of(made)
    made.add_argument("--host", default="127.0.0.1", help="an address of this machine that only it can reach")
    made.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    made.add_argument("--tokenizer", default=None, metavar="DIR", help="a model folder to spell tokens with")

    made = command(
        "lake",
        _lake,
        "put a book's events into a DuckLake that many machines append to, or merge its files",
        'rollbook lake runs/my-book --catalogue "host=db dbname=rollbook" --data /shared/rollbook',
    )
    book_of(made)
    made.add_argument("--catalogue", default=None, metavar="CONNECTION", help="of PostgreSQL, as libpq writes it")
    made.add_argument("--data", default=None, metavar="DIR", help="a folder by the same path on every machine")
    made.add_argument("--compact", action="store_true", help="have DuckLake merge small files")

    made = command(
        "prune",
        _prune,
        "remove messages and tokens of chosen episodes for good, keeping the facts; ends what an earlier prune began",
        "rollbook prune runs/my-book --where \"closed_at < '2026-01-01'\" --dry-run",
    )
    book_of(made)
    made.add_argument("--where", required=True, metavar="SQL", help="a condition on the episodes table; open ones stay")
    made.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    made.add_argument("--yes", action="store_true", help="do not ask")

    from . import cli_data, cli_terminal

    cli_terminal.add_commands(command, out, Stop)
    cli_data.add_commands(command, out)

    made = command("demo", _demo, "train a small real model on arithmetic, from a durable book", "rollbook demo")
    made.add_argument("--seed", type=int, default=1, help="another seed is another run in the same book")
    made.add_argument("--dir", default="runs/demo", help="where the book and the plot go")
    made.add_argument(
        "--steps", type=int, default=None, help="training steps; by default as many as take about ten minutes"
    )
    made.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads to use")
    made.add_argument("--algorithm", default="grpo", help="which algorithm learns: grpo, ppo, rloo, dapo, ...")

    made = command(
        "run-areal",
        _areal,
        "run a training script written for AReaL, unchanged",
        "rollbook run-areal train.py --config config.yaml",
    )
    made.add_argument("script", metavar="SCRIPT", help="the script; its `areal` imports are answered by Rollbook")
    made.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script gets as its arguments"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The `rollbook` command."""
    args = _parser().parse_args(argv)
    # A scheduler's word to end is Ctrl-C's: servers are to be taken along, wherever they run.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        args.command(args)
    except _EXPECTED as error:
        _fail(str(error))
    except OSError as error:  # a port in use, a folder that cannot be written, a full disk
        if args.command is _areal:  # the script's own, which wants its traceback
            raise
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(f"this needs the package {error.name}; pip install 'rollbook[{extra}]'")
    except KeyboardInterrupt:
        _stopped()
    except (RuntimeError, duckdb.Error) as error:
        # A KeyboardInterrupt that DuckDB met first: in a query, or where it asked an Arrow table for something.
        if str(error) != "Query interrupted" and "failed: KeyboardInterrupt" not in str(error):
            raise
        _stopped()
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped() -> NoReturn:
    err.print("rollbook: stopped; what was acknowledged is in the book, and the same command goes on from there")
    sys.exit(130)


def _fail(message: str) -> NoReturn:
    # The message is text, not markup: paths and SQL may hold square brackets.
    err.print(Text.assemble(("rollbook: ", "bold red"), message), soft_wrap=True, highlight=False)
    sys.exit(1)


_EXPECTED = (Stop, AgentsError, ConfigError, LaunchFailed, LearnerError, ModelUnavailable, ProxyError, StoreError)

_EXTRAS = {
    "torch": "train",
    "transformers": "train",
    "safetensors": "train",
    "litestar": "serve",
    "uvicorn": "serve",
    "tokenizers": "serve",
    "jinja2": "serve",
    "prometheus_client": "serve",
    "opentelemetry": "tracing",
    "agents": "agents-openai",
    "openai": "agents-openai",
    "math_verify": "math",
    "gguf": "demo",
    "ray": "ray",
    "matplotlib": "plot",
    "pandas": "data",
    "polars": "data",
    "datasets": "data",
}


if __name__ == "__main__":
    main()
