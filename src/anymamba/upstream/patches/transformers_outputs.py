"""Generation must not need transformers, nor names that transformers 5 dropped."""

from __future__ import annotations

import libcst as cst

from anymamba.upstream.patches import AnchorMovedError, Rule
from anymamba.upstream.patches._edits import imported_names, on_tree, parse, replace_imports, top_level_imports

_OUTPUTS = ("GreedySearchDecoderOnlyOutput", "SampleDecoderOnlyOutput", "GenerateDecoderOnlyOutput")


class _QuoteStreamer(cst.CSTTransformer):
    """`Optional[TextStreamer]` -> `Optional["TextStreamer"]`: the name is there for readers and type checkers only."""

    def leave_Annotation(self, original_node: cst.Annotation, updated_node: cst.Annotation) -> cst.Annotation:
        class Quote(cst.CSTTransformer):
            def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
                return cst.SimpleString('"TextStreamer"') if updated_node.value == "TextStreamer" else updated_node

        annotation = updated_node.annotation.visit(Quote())
        assert isinstance(annotation, cst.BaseExpression)
        return updated_node.with_changes(annotation=annotation)


def _edit(module: cst.Module) -> cst.Module:
    names = [name for s in top_level_imports(module, ["transformers"]) for name in imported_names(s)]
    outputs = [name for name in names if name in _OUTPUTS]
    if not outputs or set(names) - {*_OUTPUTS, "TextStreamer"}:
        raise AnchorMovedError("import of only decoder outputs and TextStreamer from transformers")
    lines = ["from anymamba.upstream.port.generation import decoder_output as _decoder_output"]
    lines += [f"{name} = _decoder_output" for name in outputs]
    return replace_imports(module, ["transformers"], parse("\n".join(lines) + "\n")).visit(_QuoteStreamer())


RULE = Rule(
    id="transformers-outputs",
    reason="transformers 5 has no GreedySearchDecoderOnlyOutput and SampleDecoderOnlyOutput, and generation needs of "
    "transformers only a container for its result.",
    package="mamba_ssm",
    versions="",
    files=("utils/generation.py",),
    edit=on_tree(_edit),
)
