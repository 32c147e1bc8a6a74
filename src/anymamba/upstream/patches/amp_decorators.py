"""`torch.cuda.amp.custom_fwd` and `custom_bwd` warn since torch 2.4; `torch.amp` has their successors."""

from __future__ import annotations

import ast

from anymamba.upstream.patches import AnchorMovedError, Rule

_REPLACEMENT = """\
try:  # torch 2.4 moved them and made the device an argument
    from functools import partial as _partial
    from torch.amp import custom_bwd, custom_fwd
    custom_bwd = _partial(custom_bwd, device_type="cuda")
    custom_fwd = _partial(custom_fwd, device_type="cuda")
except ImportError:
    from torch.cuda.amp import custom_bwd, custom_fwd
"""


def _edit(source: str) -> str:
    # by the text of the statement: some of these files are long, and a tree that keeps every space takes seconds
    statements = ast.parse(source).body
    found = [s for s in statements if isinstance(s, ast.ImportFrom) and s.module == "torch.cuda.amp" and not s.level]
    if len(found) != 1 or {alias.name for alias in found[0].names} != {"custom_fwd", "custom_bwd"}:
        raise AnchorMovedError("one import of custom_fwd and custom_bwd from torch.cuda.amp at its top level")
    lines = source.splitlines(keepends=True)
    lines[found[0].lineno - 1 : found[0].end_lineno] = [_REPLACEMENT]
    return "".join(lines)


RULE = Rule(
    id="amp-decorators",
    reason="torch.cuda.amp.custom_fwd and custom_bwd are deprecated since torch 2.4 and warn at every import.",
    package="mamba_ssm",
    versions="<2.2.3",
    files=("**/*.py",),
    edit=_edit,
    hint="torch.cuda.amp",
)
