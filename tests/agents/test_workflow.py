"""Whatever a person calls their agent is resolved, or refused in a sentence that says what to do."""

import functools
import sys
import textwrap
import threading

import numpy as np
import pytest

from rollbook.agents.errors import Rejected, WorkflowError
from rollbook.agents.workflow import RolloutWorkflow, Session, resolve

SESSION = Session(session_id="ep_1", api_key="sk-rb-1", base_url="http://127.0.0.1:1/v1")
pytestmark = pytest.mark.anyio


class Counting:
    """An agent with state."""

    def __init__(self, start: int = 0) -> None:
        self.calls = start

    async def run(self, data, **extra_kwargs):
        self.calls += 1
        return {"calls": self.calls, "data": data, **extra_kwargs}


class Direct(RolloutWorkflow):
    def __init__(self, result=None, rewards=None) -> None:
        self.result, self.rewards = result, rewards or {}

    async def arun_episode(self, engine, data):
        engine.rewards.update(self.rewards)
        return self.result


async def plain(data, base_url, flavour="none"):
    return data["x"], base_url, flavour


def sync(data):
    return threading.current_thread() is threading.main_thread()


async def run(workflow, data=None, **kwargs):
    return await resolve(workflow, **kwargs).run(data or {"x": 1}, SESSION)


async def test_an_agent_gets_its_row_and_where_its_calls_go():
    got = await run(Counting(), {"messages": []})
    assert got["data"] == {"messages": []}
    assert got["base_url"] == SESSION.base_url
    assert got["api_key"] == SESSION.api_key
    assert got["http_client"] is None


async def test_an_agent_keeps_its_state_between_episodes():
    agent = Counting()
    workflow = resolve(agent)
    await workflow.run({}, SESSION)
    await workflow.run({}, SESSION)
    assert agent.calls == 2
    built = resolve(Counting, start=10)
    await built.run({}, SESSION)
    assert (await built.run({}, SESSION))["calls"] == 12


async def test_an_agent_cannot_change_the_row_of_the_next_sample():
    async def spoil(data):
        data["x"] = 2
        return data["x"]

    workflow, row = resolve(spoil), {"x": 1}
    await workflow.run(row, SESSION)
    assert row == {"x": 1}


async def test_a_function_gets_only_the_keywords_it_takes_and_its_workflow_kwargs():
    assert await run(plain, flavour="sweet") == (1, SESSION.base_url, "sweet")
    assert await run(functools.wraps(plain)(lambda *a, **k: plain(*a, **k))) == (1, SESSION.base_url, "none")


async def test_sync_code_runs_in_a_thread_of_its_own():
    assert await run(sync) is False


async def test_a_rollout_workflow_is_taken_as_instance_subclass_or_anything_with_arun_episode():
    assert await run(Direct(result={}, rewards={"a": 1.0})) == {"a": 1.0}
    assert await run(Direct, result={"a": object()}) is None  # interactions without rewards: none yet
    assert await run(Direct, result=0.5) == 0.5

    class Lookalike:
        async def arun_episode(self, engine, data):
            return 1.0

    assert await run(Lookalike) == 1.0
    with pytest.raises(Rejected, match="rejects this sample"):
        await run(Direct())


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


async def test_an_import_string_is_found_in_the_current_directory(here):
    here("my_agent.py", "class MathAgent:\n    async def run(self, data, **kw):\n        return data['x'] + 0.5\n")
    here("pack/__init__.py", "")
    here("pack/inner.py", "from my_agent import MathAgent as A\nasync def go(data):\n    return 7.0\n")
    assert await run("my_agent.MathAgent") == 1.5
    assert await run("my_agent:MathAgent") == 1.5
    assert await run("pack.inner.go") == 7.0
    assert await run("pack.inner:A") == 1.5


async def test_a_file_and_a_name_in_it_is_as_good_as_an_import(here, tmp_path):
    agent = "from helper_of_it import number\nclass MathAgent:\n    async def run(self, data, **kw): return number\n"
    here("deep/my_filed_agent.py", agent)
    here("deep/helper_of_it.py", "number = 4.0\n")
    assert await run("deep/my_filed_agent.py:MathAgent") == 4.0
    assert await run(f"{tmp_path}/deep/my_filed_agent.py:MathAgent") == 4.0
    here("deep/json.py", "class A:\n    async def run(self, data, **kw): return 5.0\n")
    here("deep/with-dash.py", "class A:\n    async def run(self, data, **kw): return 6.0\n")
    assert await run("deep/json.py:A") == 5.0
    assert sys.modules["json"].loads("1") == 1  # everybody's json is still that
    assert await run("deep/with-dash.py:A") == 6.0
    here("deep/json.py", "class A:\n    async def run(self, data, **kw): return 5.25\n")
    assert await run("deep/json.py:A") == 5.25  # as it is now
    with pytest.raises(WorkflowError, match=r"there is no file deep/no\.py in .* or on PYTHONPATH"):
        resolve("deep/no.py:A")
    with pytest.raises(WorkflowError, match=r"is a module; name the class .* as 'deep/json.py:MathAgent'"):
        resolve("deep/json.py")
    with pytest.raises(WorkflowError, match=r"deep/json.py has no 'B' "):
        resolve("deep/json.py:B")
    here("deep/broken.py", "1 / 0\n")
    with pytest.raises(WorkflowError, match=r"(?s)importing deep/broken.py failed.*ZeroDivisionError"):
        resolve("deep/broken.py:A")


async def test_what_is_missing_is_named(here):
    here("my_agent.py", "class MathAgent:\n    async def run(self, data, **kw): ...\nnumber = 3\n")
    with pytest.raises(WorkflowError, match="there is no module 'my_agnet' in"):
        resolve("my_agnet.MathAgent")
    with pytest.raises(WorkflowError, match=r"my_agent has no 'MathAgnt' .*my_agent.py\); did you mean 'MathAgent'\?"):
        resolve("my_agent.MathAgnt")
    with pytest.raises(WorkflowError, match="is a module; name the class or function in it"):
        resolve("my_agent")
    with pytest.raises(WorkflowError, match="is a int without a `run` method"):
        resolve("my_agent.number")
    with pytest.raises(WorkflowError, match=r"names nothing; expected 'my_agent\.MathAgent' or"):
        resolve("my-agent/MathAgent")


async def test_an_error_inside_the_import_comes_with_its_own_traceback(here):
    here("broken.py", "def f():\n    return 1 / 0\n\nf()\n")
    with pytest.raises(WorkflowError) as caught:
        resolve("broken.Agent")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    text = str(caught.value)
    assert 'broken.py", line 2, in f' in text
    assert "ZeroDivisionError: division by zero" in text
    assert "importlib" not in text
    here("needs.py", "import a_package_nobody_has\n")
    with pytest.raises(WorkflowError, match=r"(?s)importing needs failed.*No module named 'a_package_nobody_has'"):
        resolve("needs.Agent")
    here("bad_syntax.py", "class Agent\n")
    with pytest.raises(WorkflowError, match="SyntaxError"):
        resolve("bad_syntax.Agent")


async def test_what_is_no_agent_is_refused():
    with pytest.raises(WorkflowError, match="only the online mode"):
        resolve(None)
    with pytest.raises(WorkflowError, match="is a class without a `run` method"):
        resolve(dict)
    with pytest.raises(WorkflowError, match="without a `run` method"):
        resolve(np.zeros(3))
    with pytest.raises(WorkflowError, match="cannot be built from workflow_kwargs"):
        resolve(Counting, stop=1)
    with pytest.raises(WorkflowError, match="is built already"):
        resolve(Counting(), start=1)
