"""What the run-areal tests use as a dataset and as a model's side of conversations."""

import itertools
import re

from agents_scripts import call


def rows():
    """Questions and answers."""
    return [
        {"messages": [{"role": "user", "content": f"What is 3 * {i} + 5?"}], "answer": str(3 * i + 5)} for i in range(4)
    ]


def script(tokenizer):
    """Uses the tools, or answers outright where there are none; every other answer is wrong."""
    answers = itertools.count()

    def answer(generation):
        text = tokenizer.decode(generation.prompt_ids)
        asked = int(re.findall(r"What is 3 \* (\d+)", text)[-1])
        results = text.count("<|im_start|>tool")
        if "<tools>" in text and results < 2:
            said = call("multiply", a=3, b=asked) if not results else call("add", a=3 * asked, b=5)
        else:
            said = str(3 * asked + 5 + next(answers) % 2)
        return tokenizer.encode(said + "<|im_end|>").tolist()

    return answer
