"""verifiers' results: `traces.jsonl` of version 0.4 (graphs of messages, with tokens where its client had them) and
`results.jsonl` of the versions before (prompt, completion, reward; tokens where `trajectory` was saved).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .record import Attempt, Call, Imported, Message, WrongSource, digest, json_lines

ROUNDED = "interactions have logprobs that verifiers rounded when it wrote them"
OLDEST = "episodes say a span of policy versions: each of their tokens has the oldest"


def read(path: Path, outcome: Imported) -> Iterator[Attempt]:
    n_of: dict[str, int] = {}
    for place, row in json_lines(path, outcome):
        try:
            if "traces" in row:
                yield _episode(row, outcome)
            elif "completion" in row:
                same = digest(row)
                n_of[same] = n_of.get(same, 0) + 1
                yield _result(row, f"{same} {n_of[same]}", outcome)
            else:
                raise WrongSource(f"{place}: expected an episode with traces, or a result with prompt and completion")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, WrongSource):
                raise
            raise WrongSource(f"{place}: not as verifiers writes it ({type(error).__name__}: {error})") from error


# ---------------------------------------------------------------- 0.4


def _episode(row: dict[str, Any], outcome: Imported) -> Attempt:
    run = row.get("run") or {}
    policy = (run.get("work") or {}).get("policy")
    version = None if policy is None else int(policy["start"])
    if policy is not None and policy["end"] != policy["start"]:
        outcome.notes[OLDEST] += 1
    task = row["task"]
    group = row.get("group") or {}
    failed = not row.get("ok", False)
    errors = row.get("errors") or [e for trace in row["traces"] for e in trace.get("errors", ())]
    attempt = Attempt(
        key=row["id"],
        episode_id=f"vf_{row['id']}",
        task_id=str(task.get("key") or task.get("hash") or digest(task["data"])[:16]),
        group_id=group.get("id"),
        task=task["data"],
        is_eval=run.get("type") == "eval" or (run.get("work") or {}).get("type") == "eval",
        version=version,
        calls=[],
        state="failed" if failed else "done",
        reason=errors[-1].get("message") if failed and errors else None,
    )
    totals: dict[str, float] = {}
    for trace in row["traces"]:
        first = len(attempt.calls)
        attempt.calls += _trace_calls(trace, first, version, outcome)
        values = [(name, one) for name, one in (trace.get("rewards") or {}).items() if one is not None]
        total = sum(one["score"] * one.get("weight", 1.0) for _, one in values)
        if len(row["traces"]) > 1 and len(attempt.calls) > first and values:
            attempt.calls[-1].reward = total  # each agent's own, so that one's does not reach another
        for name, one in values:
            totals[name] = totals.get(name, 0.0) + one["score"]
        for name, one in (trace.get("metrics") or {}).items():
            if one is not None:
                totals.setdefault(name, 0.0)
                totals[name] += one
        if len(row["traces"]) == 1 and values:
            attempt.rewards.append(("reward", total, 1.0))
    attempt.rewards += [(name, value, 1.0) for name, value in sorted(totals.items()) if name != "reward"]
    return attempt


def _trace_calls(trace: dict[str, Any], first: int, version: int | None, outcome: Imported) -> Iterator[Call]:
    nodes = trace["nodes"]
    finished = {
        call["node"]: call.get("finish_reason") for call in trace.get("calls", ()) if call.get("node") is not None
    }
    role = (trace.get("agent") or {}).get("name")
    for i, node in enumerate(nodes):
        if not node.get("sampled"):
            continue
        way = [i]
        while nodes[way[-1]].get("parent") is not None:
            way.append(nodes[way[-1]]["parent"])
        way.reverse()
        tools = [_tool(tool) for tool in nodes[way[0]].get("tools") or ()]
        call = Call(
            messages=[_message(nodes[n]["message"]) for n in way[:-1]],
            reply=_message(node["message"]),
            tools=tools,
            role=role,
            finish_reason=finished.get(i),
            at=int(node["timestamp"] * 1e6) if node.get("timestamp") else None,
        )
        ids = np.array([t for n in way for t in nodes[n].get("token_ids") or ()], np.int32)
        mask = np.array(node.get("mask") or (), bool)
        if mask.any():
            start = len(ids) - len(mask) + int(np.argmax(mask))
            stop = len(ids) - int(np.argmax(mask[::-1]))
            logprobs = np.array(node.get("logprobs") or (), np.float32)
            call.prompt_ids, call.output_ids = ids[:start], ids[start:stop]
            if len(logprobs) == stop - start:
                call.logprobs = logprobs
                call.versions = None if version is None else np.full(stop - start, version, np.int32)
                outcome.notes[ROUNDED] += 1
        yield call


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "function" in tool:
        return tool
    kept = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": kept}


def _message(message: dict[str, Any]) -> Message:
    """In chat form: verifiers holds a call's name and arguments beside its id."""
    said = {name: value for name, value in message.items() if value is not None}
    if said.get("tool_calls"):
        said["tool_calls"] = [
            call
            if "function" in call
            else {"id": call["id"], "type": "function", "function": {n: call[n] for n in ("name", "arguments")}}
            for call in said["tool_calls"]
        ]
    return said


# ---------------------------------------------------------------- before


def _result(row: dict[str, Any], key: str, outcome: Imported) -> Attempt:
    prompt = _said(row["prompt"], "user")
    error = row.get("error")
    metrics = {name: value for name, value in (row.get("metrics") or {}).items() if isinstance(value, int | float)}
    reward = row.get("reward")
    task = {name: row[name] for name in ("prompt", "answer", "info", "task") if row.get(name) is not None}
    example = row.get("example_id")
    task_id = digest(prompt, row.get("answer"))[:16] if example is None else f"example-{example}"
    steps = row.get("trajectory")
    tools = [_tool(tool) for tool in row.get("tool_defs") or ()]
    return Attempt(
        key=key,
        task_id=task_id,
        group_id=task_id,
        task=task,
        calls=list(
            _steps(steps, tools) if steps else _completion(prompt, _said(row["completion"], "assistant"), tools)
        ),
        rewards=[
            *([] if reward is None else [("reward", float(reward), 1.0)]),
            *((name, float(value), 1.0) for name, value in metrics.items() if name != "reward"),
        ],
        state="failed" if error else "done",
        reason=None if not error else str(error.get("error") if isinstance(error, dict) else error),
    )


def _said(messages: Any, role: str) -> list[Message]:
    if messages is None:
        return []
    if isinstance(messages, str):
        return [{"role": role, "content": messages}]
    return [_message(message) for message in messages]


def _completion(prompt: list[Message], completion: list[Message], tools: list[dict[str, Any]]) -> Iterator[Call]:
    for n, message in enumerate(completion):
        if message.get("role") == "assistant":
            yield Call(messages=[*prompt, *completion[:n]], reply=message, tools=tools)


def _steps(steps: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Iterator[Call]:
    for step in steps:
        completion = _said(step["completion"], "assistant")
        call = Call(messages=_said(step["prompt"], "user"), reply=completion[-1], tools=tools)
        tokens = step.get("tokens") or {}
        if tokens.get("completion_ids"):
            call.prompt_ids = np.array(tokens["prompt_ids"], np.int32)
            call.output_ids = np.array(tokens["completion_ids"], np.int32)
            logprobs = tokens.get("completion_logprobs") or ()
            call.logprobs = np.array(logprobs, np.float32) if len(logprobs) == len(call.output_ids) else None
        yield call
