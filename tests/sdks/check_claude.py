"""`make test-sdks`: the Claude Agent SDK (its wheel holds a 400 MB program) against the real server."""

from sdk_checks import run_example


def test_the_claude_agent_sdk_is_recorded_call_by_call_and_rewarded() -> None:
    result = run_example("claude_math.MathAgent", "claude_calculator")
    assert result["episodes"] == [["done", None, 1.0, 3]] * 2
    assert result["dialects"] == ["messages"]
    assert result["is_whole"]
    assert sorted(map(str, result["edges"])) == ["None"] * 2 + ["extends"] * 4


def test_the_title_call_is_beside_the_conversation_which_the_changing_header_does_not_cut() -> None:
    """`x-anthropic-billing-header: cc_version=...` in the system prompt ends in another way for each first message. The
    title is asked for first, so the reward must not go by what came first."""
    result = run_example("claude_titled.MathAgent", "claude_titled")
    assert result["episodes"] == [["done", None, 1.0, 4]] * 2
    assert result["is_whole"]
    assert sorted(map(str, result["edges"])) == ["None"] * 4 + ["extends"] * 4
    assert result["rewarded_edges"] == ["extends"] * 2
