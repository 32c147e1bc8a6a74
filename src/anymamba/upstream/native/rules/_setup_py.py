"""What the rules for upstream's setup.py share: edits of its syntax tree. Our own builds never run that file."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from anymamba.upstream.native.rules import AnchorMovedError, Arguments, Target

__all__ = ["never", "transform"]


def never(target: Target) -> bool:
    """No build of ours needs a rule for setup.py: it is not executed."""
    return False


def transform(make: Callable[[], cst.CSTTransformer], anchor: str) -> Callable[[str, Arguments], str]:
    """Return the edit that a transformer makes; a tree that it leaves alone lacks the anchor."""

    def edit(text: str, arguments: Arguments) -> str:
        module = cst.parse_module(text)
        changed = module.visit(make())
        if changed.deep_equals(module):
            raise AnchorMovedError(anchor)
        return changed.code

    return edit
