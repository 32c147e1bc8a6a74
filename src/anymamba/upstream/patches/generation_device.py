"""Generation measures time and captures graphs with CUDA's means; on other devices it must do without."""

from __future__ import annotations

import libcst as cst

from anymamba.upstream.patches import AnchorMovedError, Rule
from anymamba.upstream.patches._edits import dotted, on_tree, parse


class _Decode(cst.CSTTransformer):
    """Inside `decode`: CUDA events become timers of the input's device; a graph is captured on CUDA only."""

    def __init__(self) -> None:
        self.events = 0
        self.guarded = 0
        self._depth: list[str] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._depth.append(node.name.value)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        self._depth.pop()
        if original_node.name.value != "decode" or not isinstance(updated_node.body, cst.IndentedBlock):
            return updated_node
        statements = list(updated_node.body.body)
        first = 1 if original_node.get_docstring() is not None else 0
        statements[first:first] = parse("cg = cg and input_ids.is_cuda  # elsewhere there is no graph to capture\n")
        self.guarded += 1
        return updated_node.with_changes(body=updated_node.body.with_changes(body=statements))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if "decode" in self._depth and dotted(updated_node.func) == "torch.cuda.Event":
            self.events += 1
            device = cst.Arg(cst.parse_expression("input_ids.device"))
            return updated_node.with_changes(func=cst.Name("_device_timer"), args=[device, *updated_node.args])
        if "decode" in self._depth and dotted(updated_node.func) == "torch.cuda.synchronize":
            return updated_node.with_changes(func=cst.parse_expression("end.synchronize"))
        return updated_node


def _edit(module: cst.Module) -> cst.Module:
    decode = _Decode()
    edited = module.visit(decode)
    if decode.events != 2 or decode.guarded != 1:
        raise AnchorMovedError("function decode with two torch.cuda.Event")
    body: list[cst.BaseStatement] = list(edited.body)
    at = next(i for i, statement in enumerate(body) if isinstance(statement, cst.FunctionDef | cst.ClassDef))
    body = [
        *body[:at],
        *parse("from anymamba.upstream.port.generation import device_timer as _device_timer\n"),
        *body[at:],
    ]
    return edited.with_changes(body=body)


RULE = Rule(
    id="generation-device",
    reason="decode makes torch.cuda.Event, which a PyTorch without CUDA cannot, and cg=True captures a CUDA graph.",
    package="mamba_ssm",
    versions="",
    files=("utils/generation.py",),
    edit=on_tree(_edit),
)
