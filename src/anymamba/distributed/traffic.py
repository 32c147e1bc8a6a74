"""Counts what travels between the ranks of a sequence: bytes and messages of this process, exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Traffic", "count", "count_traffic"]


@dataclass
class Traffic:
    """What this process sent and received.

    Attributes
    ----------
    sent, received : int
        Bytes of tensors. An all-gather counts as sending one's own part to, and receiving the part of, every other rank.
    messages : int
        Tensors sent or gathered.
    """

    sent: int = 0
    received: int = 0
    messages: int = 0


_counting: list[Traffic] = []


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the traffic of the sharded operators in this context, forward and backward, handshakes included.

    Yields
    ------
    Traffic
        Grows while the context lasts.
    """
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting[:] = [other for other in _counting if other is not traffic]


def count(sent: torch.Tensor | None = None, received: torch.Tensor | None = None, times: int = 1) -> None:
    """Add tensors that are sent or received `times` times."""
    for traffic in _counting:
        if sent is not None:
            traffic.sent += times * sent.numel() * sent.element_size()
            traffic.messages += 1
        if received is not None:
            traffic.received += times * received.numel() * received.element_size()
