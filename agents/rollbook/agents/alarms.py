"""math_verify in any thread.

It limits its time by alarm signals, which only a main thread may set, and refuses to work elsewhere; agents run on
event loops in threads. `ready_math_verify` gives it a limit that works in every thread: an exception set in the
thread from outside, which Python code (sympy is) meets at its next step. Main threads keep the signals.
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_MARK = "_rollbook_any_thread"


def ready_math_verify() -> None:
    """Let math_verify, where it has been imported, work in this process's other threads. Twice is once."""
    if "math_verify" not in sys.modules:
        return
    from math_verify import grader, parser
    from math_verify.errors import TimeoutException

    for module in (parser, grader):
        if not hasattr(module.timeout, _MARK):
            module.timeout = _any_thread(module.timeout, TimeoutException)


def _any_thread(timeout: Callable[..., Any], error: type[BaseException]) -> Callable[..., Any]:
    """math_verify's decorator factory `timeout`, with another way to end a call outside of main threads."""

    @functools.wraps(timeout)
    def limited(timeout_seconds: int | None = 10) -> Any:
        if not timeout_seconds or threading.current_thread() is threading.main_thread():
            return timeout(timeout_seconds)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: in_time(lambda: function(*args, **kwargs), timeout_seconds, error)

        return decorate

    setattr(limited, _MARK, True)
    return limited


def in_time(function: Callable[[], Any], seconds: float, error: type[BaseException]) -> Any:
    """`function()`, with `error` raised in it when it takes longer. A single long call into C ends only after it."""
    thread_id = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    is_over = False

    def interrupt() -> None:
        with lock:
            if not is_over:
                _set_async_exc(thread_id, ctypes.py_object(error))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        return function()
    finally:
        timer.cancel()
        with lock:
            is_over = True
            _set_async_exc(thread_id, None)  # one that was set and not met yet must not meet what comes next
