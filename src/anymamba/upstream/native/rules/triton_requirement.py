"""A hard requirement of `triton`, which has no distribution of that name for Windows."""

from __future__ import annotations

import re

from anymamba.upstream.native.rules import AnchorMovedError, Arguments, Rule
from anymamba.upstream.native.rules._setup_py import never

# An element of a list of requirements, on its own line; setup.py and pyproject.toml spell it alike.
_REQUIREMENT = re.compile(
    r"""^(?P<indent>[ \t]*)(?P<quote>["'])triton(?P<rest>[^"';#\n]*)(?P=quote)(?P<comma>,?)""", re.M
)


def _edit(text: str, arguments: Arguments) -> str:
    marker = "; sys_platform == 'linux'"

    def limited(found: re.Match[str]) -> str:
        return f'{found["indent"]}"triton{found["rest"].rstrip()}{marker}"{found["comma"]}'

    edited, count = _REQUIREMENT.subn(limited, text)
    if not count:
        raise AnchorMovedError("requirement of triton")
    return edited


RULE = Rule(
    id="triton-requirement",
    compiler="pip",
    says="ERROR: No matching distribution found for triton (from versions: none)",
    reason="On Windows Triton is another project (triton-windows), and the compiled extensions do not need it.",
    releases={"mamba_ssm": "!=2.2.4"},
    files={"mamba_ssm": ("setup.py", "pyproject.toml")},
    edit=_edit,
    every_file=False,
    wanted=never,
    guide="install without dependencies: holds for causal_conv1d; mamba_ssm's guide line needs it as well",
    fault="triton-no-wheel",
)
