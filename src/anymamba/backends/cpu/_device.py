"""The one refusal that every module of this backend shares."""

from __future__ import annotations

from anymamba.backends import Call, Operator

__all__ = ["refusal"]


def refusal(operator: Operator, call: Call) -> str | None:
    """Return why this backend cannot do the call, or None."""
    return None if call.device.type == "cpu" else f"runs on the CPU only; the tensors are on {call.device}"
