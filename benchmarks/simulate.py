"""Throughput against staleness against the number of proxies and engines: a simulation, fed with what was measured.

    python benchmarks/simulate.py [--book BOOK] [--engines 8 16 32] [--proxies 1 2 4] [--eta 0 1 2 4]

Episodes are chains of turns. A turn waits for its proxy's core (`proxy_s` of CPU), for the commit, then for its engine,
which shares its steps among the requests it has: each gets a token every `token_s + batch * token_batch_s`. After the
answer the agent thinks (tools, other services), which costs nobody here anything. The learner takes a batch of finished
groups, trains for as long as its tokens take, and publishes: engines stand still for `update_s`, one after the other
(rolling) or all at once (barrier). Groups begin as `rollbook.agents.capacity` lets them.

Turns, answer lengths and thinking times are drawn from a book (`--book`), whole episodes at a time, or from the fixed
distribution in `Measured`. Events in a heap; nothing is averaged beforehand. Staleness is the learner's version when a
token is taken minus the version that sampled it, over tokens. Same seed, same result.
"""

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollbook.agents.capacity import capacity


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Costs. The first three are figures of docs/figures.md; those of engine and learner depend on the model and
    have to be measured for it: these are placeholders of the right order for some 8 B on one GPU per engine."""

    proxy_s: float = 1.0e-3  # CPU of one interaction in a proxy; one core each
    commit_s: float = 1.0e-3  # until it is durable
    engine_slots: int = 256  # requests that an engine runs at once; more wait
    token_s: float = 8.0e-3  # one decoding step of one request
    token_batch_s: float = 6.0e-5  # more, for each other request in the batch
    train_token_s: float = 1.5e-5 / 8  # learner, per token, on eight GPUs
    train_fixed_s: float = 1.0
    update_s: float = 3.0
    episodes: Sequence[Sequence[tuple[int, float]]] = ()  # (answer's tokens, thinking after it) of each turn

    def episode(self, rng: random.Random) -> Sequence[tuple[int, float]]:
        if self.episodes:
            return rng.choice(self.episodes)
        turns = min(32, 1 + int(rng.expovariate(1 / 7)))
        return [
            (max(8, min(4096, int(rng.lognormvariate(5.3, 0.9)))), rng.lognormvariate(0.0, 1.2)) for _ in range(turns)
        ]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is to be decided."""

    proxies: int = 1
    engines: int = 8
    eta: int = 1
    batch_groups: int = 32
    n_samples: int = 8
    max_concurrent: int | None = None  # groups; None: what staleness allows
    update: str = "rolling"
    steps: int = 20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """seconds is the wall time of the steps; busy: shares of that time."""

    seconds: float
    interactions: int
    tokens: int
    staleness: float
    stalest: int
    learner_busy: float
    engines_busy: float
    proxies_busy: float

    @property
    def per_second(self) -> float:
        return self.interactions / self.seconds


class Engine:
    """Processor sharing in a clock of its own: every request in the batch is given tokens at the same pace."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.clock = 0.0  # tokens that one request would have got so far
        self.at = 0.0
        self.batch: list[
            tuple[float, int, float, Callable[[float], None]]
        ] = []  # (clock at the end, tie, at the start, then)
        self.queue: deque[tuple[int, Callable[[float], None]]] = deque()
        self.versions: list[tuple[float, int]] = [(0.0, 0)]  # (clock, version from there on)
        self.stopped = 0
        self.busy_s = 0.0
        self.life = 0  # events of an earlier life of the schedule are void

    def pace(self) -> float:
        """Tokens per second of each request."""
        costs = self.world.costs
        return 0.0 if self.stopped or not self.batch else 1 / (costs.token_s + len(self.batch) * costs.token_batch_s)

    def advance(self) -> None:
        now = self.world.now
        if self.batch and not self.stopped:
            self.busy_s += now - self.at
        self.clock += (now - self.at) * self.pace()
        self.at = now

    def ask(self, tokens: int, then: Callable[[float], None]) -> None:
        self.advance()
        self.queue.append((tokens, then))
        self.fill()

    def fill(self) -> None:
        while self.queue and len(self.batch) < self.world.costs.engine_slots:
            tokens, then = self.queue.popleft()
            heapq.heappush(self.batch, (self.clock + tokens, self.world.tie(), self.clock, then))
        self.schedule()

    def schedule(self) -> None:
        self.life += 1
        pace = self.pace()
        if pace:
            life = self.life
            self.world.after(max(0.0, self.batch[0][0] - self.clock) / pace, lambda: self.ended(life))

    def ended(self, life: int) -> None:
        if life != self.life:
            return
        self.advance()
        done = []
        while self.batch and self.batch[0][0] <= self.clock + 1e-6:
            done.append(heapq.heappop(self.batch))
        self.fill()
        for end, _, start, then in done:
            then(self.version_between(start, end))

    def version_between(self, start: float, end: float) -> float:
        """The mean version of the tokens of one answer."""
        total, upper = 0.0, end
        for clock, version in reversed(self.versions):
            lower = max(clock, start)
            if lower < upper:
                total += (upper - lower) * version
                upper = lower
            if clock <= start:
                break
        return total / (end - start)

    def stop(self) -> None:
        self.advance()
        self.stopped += 1
        self.life += 1

    def go(self, version: int) -> None:
        self.advance()
        self.stopped -= 1
        self.versions.append((self.clock, version))
        self.schedule()

    @property
    def load(self) -> int:
        return len(self.batch) + len(self.queue)


class Core:
    """A proxy: one thing after the other."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.free_at = 0.0
        self.busy_s = 0.0

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        begins = max(self.world.now, self.free_at)
        self.free_at = begins + seconds

        def done() -> None:
            self.busy_s += seconds
            then()

        self.world.after(self.free_at - self.world.now, done)


@dataclass
class Group:
    left: int
    tokens: int = 0
    versions: float = 0.0  # sum over tokens
    stalest: float = 1e9


@dataclass
class World:
    """One run."""

    costs: Measured
    setting: Setting
    rng: random.Random
    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    ties: int = 0

    def __post_init__(self) -> None:
        self.engines = [Engine(self) for _ in range(self.setting.engines)]
        self.proxies = [Core(self) for _ in range(self.setting.proxies)]
        self.version = 0
        self.running = 0
        self.accepted = 0
        self.finished: deque[Group] = deque()
        self.is_training = False
        self.interactions = self.tokens = 0
        self.stale_sum, self.stale_tokens, self.stalest = 0.0, 0, 0.0
        self.trained_s = 0.0

    def tie(self) -> int:
        self.ties += 1
        return self.ties

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, self.tie(), then))

    # -- agents

    def admit(self) -> None:
        s = self.setting
        while (
            capacity(
                concurrency=s.max_concurrent or s.batch_groups * (s.eta + 1),
                consumer_batch_size=s.batch_groups,
                max_head_offpolicyness=s.eta,
                version=self.version,
                accepted=self.accepted,
                running=self.running,
            )
            > 0
        ):
            self.running += 1
            group = Group(left=s.n_samples)
            proxy = min(self.proxies, key=lambda p: p.free_at)  # a group stays at one proxy
            engine = min(self.engines, key=lambda e: e.load)
            for _ in range(s.n_samples):
                self.turn(group, proxy, engine, list(self.costs.episode(self.rng)), 0)

    def turn(self, group: Group, proxy: Core, engine: Engine, turns: list[tuple[int, float]], k: int) -> None:
        if k == len(turns):
            group.left -= 1
            if not group.left:
                self.running -= 1
                self.accepted += 1
                self.finished.append(group)
                self.train()
            return
        tokens, think_s = turns[k]
        engine = (
            min(self.engines, key=lambda e: e.load)
            if engine.load > 2 * min(e.load for e in self.engines) + 4
            else engine
        )

        def sampled(version: float) -> None:
            self.interactions += 1
            self.tokens += tokens
            group.tokens += tokens
            group.versions += version * tokens
            group.stalest = min(group.stalest, version)
            self.after(self.costs.commit_s + think_s, lambda: self.turn(group, proxy, engine, turns, k + 1))

        proxy.work(self.costs.proxy_s, lambda: engine.ask(tokens, sampled))

    # -- the learner

    def train(self) -> None:
        if self.is_training or len(self.finished) < self.setting.batch_groups:
            return
        self.is_training = True
        batch = [self.finished.popleft() for _ in range(self.setting.batch_groups)]
        n_tokens = sum(group.tokens for group in batch)
        for group in batch:
            self.stale_sum += self.version * group.tokens - group.versions
            self.stale_tokens += group.tokens
            self.stalest = max(self.stalest, self.version - group.stalest)
        seconds = self.costs.train_fixed_s + n_tokens * self.costs.train_token_s
        self.trained_s += seconds
        self.after(seconds, self.publish)

    def publish(self) -> None:
        version, update_s = self.version + 1, self.costs.update_s
        if self.setting.update == "barrier":
            for engine in self.engines:
                engine.stop()

            def all_go() -> None:
                for engine in self.engines:
                    engine.go(version)
                self.published(version)

            self.after(update_s, all_go)
            return

        def next_one(i: int) -> None:
            if i == len(self.engines):
                self.published(version)
                return
            self.engines[i].stop()

            def go() -> None:
                self.engines[i].go(version)
                next_one(i + 1)

            self.after(update_s, go)

        next_one(0)

    def published(self, version: int) -> None:
        self.version = version
        self.is_training = False
        self.admit()
        self.train()

    def run(self) -> Outcome:
        self.admit()
        while self.version < self.setting.steps:
            self.now, _, then = heapq.heappop(self.events)
            then()
        for engine in self.engines:
            engine.advance()
        return Outcome(
            seconds=self.now,
            interactions=self.interactions,
            tokens=self.tokens,
            staleness=self.stale_sum / self.stale_tokens,
            stalest=round(self.stalest),
            learner_busy=self.trained_s / self.now,
            engines_busy=sum(e.busy_s for e in self.engines) / self.now / len(self.engines),
            proxies_busy=sum(p.busy_s for p in self.proxies) / self.now / len(self.proxies),
        )


def simulate(costs: Measured, setting: Setting, seed: int = 0) -> Outcome:
    """One run of `setting.steps` steps."""
    return World(costs, setting, random.Random(seed)).run()


def episodes_of(path: str) -> list[list[tuple[int, float]]]:
    """Turns of a book's ended episodes: tokens of each answer, and seconds until the next call of the episode.

    A book records when an answer was durable, so what lies between two of them is the thinking and the next answer's
    sampling; where an engine was fast beside its tools, that is the thinking.
    """
    from rollbook.store import open_book

    with open_book(path) as book:
        rows = book.sql("""
            select i.episode_id, i.n_output, epoch(lead(i.recorded_at) over w) - epoch(i.recorded_at) as gap
            from interactions i join episodes e using (episode_id) where e.state = 'done'
            window w as (partition by i.episode_id order by i.recorded_at)
            order by i.episode_id, i.recorded_at
        """).to_pylist()
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found.setdefault(row["episode_id"], []).append((max(1, row["n_output"]), max(0.0, row["gap"] or 0.0)))
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--book", default=None, help="draw episodes from this book")
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--proxies", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--eta", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--update", choices=["rolling", "barrier"], nargs="+", default=["barrier"])
    parser.add_argument("--groups", type=int, default=32, help="groups of a step")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given, rest = parser.parse_known_args()
    changes: dict[str, Any] = {}
    for word in rest:  # any cost by its name: --token-s=0.01
        name, _, value = word.removeprefix("--").partition("=")
        changes[name.replace("-", "_")] = type(getattr(Measured(), name.replace("-", "_")))(value)
    costs = replace(Measured(episodes=episodes_of(given.book) if given.book else ()), **changes)
    print("engines proxies eta update   steps/h  calls/s  tokens/s  staleness (most)  learner  engines  proxies busy")
    for engines in given.engines:
        for proxies in given.proxies:
            for eta in given.eta:
                for update in given.update:
                    setting = Setting(
                        proxies=proxies,
                        engines=engines,
                        eta=eta,
                        update=update,
                        batch_groups=given.groups,
                        n_samples=given.samples,
                        steps=given.steps,
                    )
                    o = simulate(costs, setting, given.seed)
                    print(
                        f"{engines:7d} {proxies:7d} {eta:3d} {update:7s} {3600 * given.steps / o.seconds:9.1f} "
                        f"{o.per_second:8.1f} {o.tokens / o.seconds:9.0f} {o.staleness:10.2f} ({o.stalest}) "
                        f"{o.learner_busy:11.2f} {o.engines_busy:8.2f} {o.proxies_busy:8.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
