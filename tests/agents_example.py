"""Runs one agent inline against a real server and a scripted model, as a program of its own; prints what came of it.

Agents keep clients beyond their episodes and close none, which is their business in a program and ours in a test run.
usage: python agents_example.py WORKFLOW SCRIPT [thread]
"""

import json
import sys

import anyio

import agents_scripts
from proxy_serving import serving
from rollbook.agents.data import tasks_of
from rollbook.agents.runner import Runner
from rollbook.agents.threads import in_thread_loop
from rollbook.proxy.client import ProxyClient

ROWS = [{"messages": [{"role": "user", "content": "What is 3 * 4 + 5?"}], "answer": "17"}]


async def main(workflow: str, script: str, *, in_thread: bool) -> None:
    async with serving(getattr(agents_scripts, script)) as served:

        async def run() -> list:
            async with ProxyClient(served.url, served.service.admin_key) as client:
                runner = Runner(client, workflow, run_id="run", n_samples=2, time_limit_s=50)
                return await runner.run(tasks_of(ROWS))

        episodes = await (in_thread_loop(run, name="rollouts") if in_thread else run())
        recorded = served.events("InteractionRecorded")
        rewards = served.events("RewardGiven")
    roles = {e.interaction_id: e.fact.role for e in recorded}
    result = {
        "episodes": [[e.state, e.reason, e.reward, e.n_interactions] for e in episodes],
        "n_recorded": len(roles),
        "is_whole": all(len(e.output_ids) == len(e.logprobs) > 0 for e in recorded),
        "edges": [e.fact.edge for e in recorded],
        "dialects": sorted({e.fact.dialect for e in recorded}),
        "rewards": sorted([roles[e.interaction_id], e.fact.value] for e in rewards),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    anyio.run(lambda: main(sys.argv[1], sys.argv[2], in_thread="thread" in sys.argv[3:]))
