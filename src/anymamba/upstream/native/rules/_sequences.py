"""Find runs of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from anymamba.upstream.native.tokens import Token

__all__ = ["find"]


def find(tokens: Sequence[Token], *texts: str | None) -> list[int]:
    """Return where `texts` stand one after the other; None takes any token."""
    return [
        at
        for at in range(len(tokens) - len(texts) + 1)
        if all(text is None or tokens[at + offset].text == text for offset, text in enumerate(texts))
    ]
