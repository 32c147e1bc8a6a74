"""The list of GPU architectures: written down in setup.py, whatever card and toolkit are there."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from anymamba.upstream.native.rules import Flags, Rule, Target
from anymamba.upstream.native.rules._setup_py import transform

_APPEND = m.SimpleStatementLine(
    body=[
        m.Expr(
            m.Call(
                func=m.Attribute(value=m.Name("cc_flag"), attr=m.Name("append")),
                args=[
                    m.Arg(
                        m.SimpleString(
                            value=m.MatchIfTrue(lambda text: text.strip("\"'").startswith(("-gencode", "arch=")))
                        )
                    )
                ],
            )
        )
    ]
)


class _Remove(cst.CSTTransformer):
    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.RemovalSentinel:
        return cst.RemoveFromParent() if m.matches(original_node, _APPEND) else updated_node


def gencode(architectures: tuple[str, ...]) -> list[str]:
    """Return nvcc's options for architectures as torch writes them: "8.6", "9.0a", "12.0+PTX"."""
    options = []
    for architecture in architectures:
        number = architecture.removesuffix("+PTX").replace(".", "")
        options.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if architecture.endswith("+PTX"):
            options.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return options


def _flags(target: Target) -> Flags:
    return Flags(nvcc=tuple(gencode(target.architectures)))


RULE = Rule(
    id="architectures",
    compiler="nvcc 13, or a card that is not in the list",
    says="nvcc fatal: Unsupported gpu architecture 'compute_53'; at run time: no kernel image is available for execution",
    reason="setup.py names its own architectures and ignores TORCH_CUDA_ARCH_LIST; each one more costs as much time again.",
    releases={"causal_conv1d": "", "mamba_ssm": ""},
    files={"causal_conv1d": ("setup.py",), "mamba_ssm": ("setup.py",)},
    edit=transform(_Remove, "cc_flag.append of an architecture"),
    flags=_flags,
    wanted=lambda target: True,
    guide="not mentioned; without it every card that upstream did not list fails at run time",
    fault="arch-unsupported",
)
