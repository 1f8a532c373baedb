"""Runs one agent inline against a real server and a scripted model, as a program of its own; prints what came of it.

Agents keep clients beyond their episodes and close none, which is their business in a program and ours in a test run.
vendor: as in production: nobody runs it, only the vendor's own variables say where its model is.
usage: python agents_example.py WORKFLOW SCRIPT [thread|vendor]
"""

import inspect
import json
import os
import sys

import anyio

import agents_scripts
from proxy_serving import serving
from rollbook.agents.data import tasks_of
from rollbook.agents.naming import load
from rollbook.agents.runner import Runner
from rollbook.agents.subprocesses import environment
from rollbook.agents.threads import in_thread_loop
from rollbook.agents.workflow import Session
from rollbook.proxy.client import ProxyClient

ROWS = [{"messages": [{"role": "user", "content": "What is 3 * 4 + 5?"}], "answer": "17"}]


async def main(workflow: str, script: str, *, in_thread: bool, is_deployed: bool) -> None:
    async with serving(getattr(agents_scripts, script)) as served:
        if is_deployed:
            opened = await served.client.start_session("deployed")
            os.environ.update(environment(Session(session_id="", api_key=opened.api_key, base_url=served.base_url)))
            run_it = load(workflow)().run
            returned = run_it(dict(ROWS[0]))
            print(json.dumps({"returned": await returned if inspect.isawaitable(returned) else returned}))
            return

        async def run() -> list:
            async with ProxyClient(served.url, served.service.admin_key) as client:
                runner = Runner(client, workflow, run_id="run", n_samples=2)
                return await runner.run(tasks_of(ROWS))

        episodes = await (in_thread_loop(run, name="rollouts") if in_thread else run())
        recorded = served.events("InteractionRecorded")
        rewards = served.events("RewardGiven")
    roles = {e.interaction_id: e.fact.role for e in recorded}
    edges = {e.interaction_id: e.fact.edge for e in recorded}
    result = {
        "episodes": [[e.state, e.reason, e.reward, e.n_interactions] for e in episodes],
        "n_recorded": len(roles),
        "is_whole": all(len(e.output_ids) == len(e.logprobs) > 0 for e in recorded),
        "edges": list(edges.values()),
        "rewarded_edges": [edges[e.interaction_id] for e in rewards],
        "dialects": sorted({e.fact.dialect for e in recorded}),
        "rewards": sorted([roles[e.interaction_id], e.fact.value] for e in rewards),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    how = sys.argv[3:]
    anyio.run(lambda: main(sys.argv[1], sys.argv[2], in_thread="thread" in how, is_deployed="vendor" in how))
