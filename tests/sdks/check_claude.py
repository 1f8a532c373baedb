"""`make test-sdks`: the Claude Agent SDK (its wheel holds a 400 MB program) against the real server."""

from sdk_checks import run_example


def test_the_claude_agent_sdk_is_recorded_call_by_call_and_rewarded() -> None:
    result = run_example("claude_math.MathAgent", "claude_calculator")
    assert result["episodes"] == [["done", None, 1.0, 3]] * 2
    assert result["dialects"] == ["messages"]
    assert result["is_whole"]
    assert sorted(map(str, result["edges"])) == ["None"] * 2 + ["extends"] * 4
