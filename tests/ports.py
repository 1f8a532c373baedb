"""Ports for servers that are to come back where they were."""

import random
import socket
from contextlib import suppress


def free_ports(n: int) -> list[int]:
    """Of those that the kernel gives to nobody by itself: other programs open connections while ours is away."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1000):
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == n:
            return found
    raise RuntimeError(f"no {n} ports are free between 20,000 and 32,000")


def free_port() -> int:
    [port] = free_ports(1)
    return port
