"""Which code to ask NVRTC for, for the card at hand.

A cubin of exactly the card's architecture if NVRTC knows it; else PTX of the highest architecture that it knows and the
card can run, which the driver compiles once and keeps. Cubins of a lower minor version would mostly run too, but not
between desktop and Jetson parts, and one rule is easier to trust.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["OLDEST", "target_option", "why_unsupported"]

OLDEST = 70
"""Volta: the first with independent thread scheduling and the shuffles with masks that the kernels are written for."""


def why_unsupported(capability: int, known: Sequence[int]) -> str | None:
    """Return None if a card of this compute capability (e.g. 86) can be served by an NVRTC that knows `known`, or why not."""
    if capability < OLDEST:
        return f"the card has compute capability {capability / 10:.1f}; the kernels need {OLDEST / 10:.1f} or newer"
    if capability not in known and not any(number <= capability for number in known):
        return f"this NVRTC dropped compute capability {capability / 10:.1f} (its oldest is {min(known) / 10:.1f})"
    return None


def target_option(capability: int, known: Sequence[int]) -> str:
    """Return NVRTC's option, e.g. ``--gpu-architecture=sm_86`` (cubin) or ``--gpu-architecture=compute_90`` (PTX)."""
    if capability in known:
        return f"--gpu-architecture=sm_{capability}"
    return f"--gpu-architecture=compute_{max(number for number in known if number <= capability)}"
