"""The example of the Claude Agent SDK, but that the SDK asks for a title as well. Runs as a program of its own."""

from typing import Any

import claude_math
from claude_math import ClaudeAgentOptions, MathAgent


def _options(env: dict[str, str], **more: Any) -> ClaudeAgentOptions:
    env = {name: value for name, value in env.items() if name != "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"}
    # What it would send elsewhere ends at a closed port.
    closed = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return ClaudeAgentOptions(env={**env, **closed, "NO_PROXY": "127.0.0.1"}, **more)


claude_math.ClaudeAgentOptions = _options

__all__ = ["MathAgent"]
