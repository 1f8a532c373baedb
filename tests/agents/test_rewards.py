"""What counts as a reward."""

import contextlib
import math
import time

import numpy as np
import pytest

from rollbook.agents.alarms import in_time
from rollbook.agents.errors import BadReward
from rollbook.agents.rewards import exact_match, math_verify_score, read_reward, shaped
from rollbook.agents.threads import in_thread


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, 1.5),
        (2, 2.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(2.0), 2.0),
        (np.True_, 1.0),
    ],
)
def test_every_number_is_a_reward(value, expected):
    got = read_reward(value)
    assert got == expected
    assert type(got) is float


def test_none_is_no_reward_yet_and_a_dict_is_one_per_interaction():
    assert read_reward(None) is None
    assert read_reward({"a": 1, "b": np.float64(0.5), "c": None}) == {"a": 1.0, "b": 0.5}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "is nan"),
        (math.inf, "is inf"),
        (np.float64("nan"), "is nan"),
        ("1.0", r"'1\.0' \(str\)"),
        ([1.0], r"\(list\)"),
        (np.zeros(2), r"\(ndarray\)"),
        (1j, r"\(complex\)"),
        ({"a": "x"}, "reward of a is 'x'"),
        ({1: 1.0}, "interaction ids as keys"),
        ({"a": math.nan}, "reward of a is nan"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value, says):
    with pytest.raises(BadReward, match=says):
        read_reward(value)


@pytest.mark.anyio
async def test_math_is_verified_in_any_thread():
    assert await in_thread(lambda: math_verify_score(r"so \boxed{\frac{1}{2}}", "0.5"), name="judge") == 1.0
    assert math_verify_score(r"\boxed{17}", "17") == 1.0
    assert math_verify_score("the answer is 18", "17") == 0.0
    assert math_verify_score("no idea", "17") == 0.0


@pytest.mark.anyio
async def test_math_verify_itself_works_in_any_thread_once_made_ready():
    math_verify_score("1", "1")  # imports it and makes it ready
    from math_verify import parse, verify

    assert await in_thread(lambda: verify(parse(r"\boxed{\frac{1}{2}}"), parse("0.5")), name="judge") is True


@pytest.mark.anyio
async def test_a_call_that_takes_too_long_is_ended_in_any_thread_and_leaves_no_exception_behind():
    class TooLong(Exception):
        pass

    def spin():
        with pytest.raises(TooLong):
            in_time(lambda: [None for _ in iter(int, 1)], 0.1, TooLong)
        for _ in range(300):  # ends as its time does: the exception is met inside or not at all
            with contextlib.suppress(TooLong):
                in_time(lambda: time.sleep(0.001), 0.001, TooLong)
        return sum(range(1000))

    assert await in_thread(spin, name="spin") == 499500


def test_exact_match_ignores_case_blanks_articles_and_punctuation():
    assert exact_match("The  Cat.", "cat") == 1.0
    assert exact_match("-3", "3") == 0.0
    assert exact_match("2.5", "25") == 0.0


def test_shaping_rewards_form_and_keeps_the_right_answer_at_one():
    assert shaped(1.0, r"\boxed{3}") == 1.0
    assert shaped(0.0, r"\boxed{4}") == pytest.approx(0.1)
    assert shaped(1.0, "3") == pytest.approx(0.9)
