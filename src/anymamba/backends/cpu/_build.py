"""From a kernel's Python to an object file: numba types it and lowers it to LLVM's language, LLVM does the rest.

Of numba's pipeline only what kernels need is run: no reference counting (kernels see memory, not objects), no wrappers for
Python and C, no rewriting of array expressions. What a kernel calls is lowered into the kernel's own module, which LLVM then
works on once, instead of once for every function. In the wrappers' place stand two entries (`_native` says what they take).
"""

from __future__ import annotations

import gc
import inspect
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import codegen, compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.cpu_options import FastMathOptions
from numba.core.registry import cpu_target
from numba.core.typing.templates import make_callable_template
from numba.core.typing.templates import signature as signature_of
from numba.extending import lower_builtin

from anymamba.backends.cpu import _lowering, _native

if TYPE_CHECKING:
    from anymamba.backends.cpu._compile import Kernel

__all__ = ["build", "callable_type"]

_lock: Any = global_compiler_lock
_lower: Any = lower_builtin
_WORD, _STATUS = ir.IntType(64), ir.IntType(32)
_HEADER = _native.HEADER_BYTES // 8

_SCALARS = {"i": types.int64, "b": types.boolean, "f": types.float64}
_ELEMENTS = {
    "s": types.float32, "d": types.float64, "w": types.int32, "l": types.int64, "u": types.uint8, "o": types.boolean,
}  # fmt: skip
_ENDLESS = 1 << 40
"""Elements of every array: a kernel's sizes and strides say what of it there is."""

# By the names of their classes; a pass that a version of numba does not have is not missed.
_NOT_NEEDED = {
    "WithLift", "InlineClosureLikes", "RewriteSemanticConstants", "MakeFunctionToJitFunction", "InlineInlinables",
    "FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "LiteralArgs", "InlineOverloads",
    "NopythonRewrites", "AnnotateTypes", "NoPythonSupportedFeatureValidation", "PreParforPass", "ParforPass",
    "GenericRewrites",
}  # fmt: skip


class _Library(codegen.CPUCodeLibrary):
    """The module of one function, as it was lowered: not optimised, no machine code."""

    def __init__(self, name: str) -> None:
        super().__init__(cpu_target.target_context.codegen(), name)
        self.used: list[_Library] = []  # those of the functions it calls

    def add_llvm_module(self, module: Any) -> None:
        self._final_module.link_in(module)


class _Pipeline(compiler.CompilerBase):
    def define_pipelines(self) -> list[Any]:
        usual = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        needed = PassManager("kernel")
        for step, why in usual.passes:
            if (step if isinstance(step, type) else type(step)).__name__ not in _NOT_NEEDED:
                needed.add_pass(step, why)
        needed.finalize()
        return [needed]


@_lock
def build(kernel: Kernel, signature: str) -> bytes:
    """Return the object file of a kernel for arguments of these kinds (`_compile.CODES`)."""
    collecting = gc.isenabled()
    gc.disable()  # a million small objects, hardly any of them garbage: a tenth of the time
    try:
        kinds = [_SCALARS[code] if code in _SCALARS else types.Array(_ELEMENTS[code], 1, "C") for code in signature]
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
        compiled = _compiled(kernel, (types.int64, types.int64, *kinds), types.void)
        library = compiled.library
        library.add_ir_module(_entries(library, compiled, kinds))
        return _object_file(library)
    finally:
        if collecting:
            gc.enable()


def _compiled(kernel: Kernel, arguments: tuple[Any, ...], returned: Any) -> Any:
    flags: Any = compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.fastmath = FastMathOptions(set(kernel.flags))
    return compiler.compile_extra(
        cpu_target.typing_context, cpu_target.target_context, kernel.function, arguments, returned, flags, {},
        library=_Library(kernel.name), pipeline_class=_Pipeline,
    )  # fmt: skip


def callable_type(kernel: Kernel) -> Any:
    """Return the type by which numba calls this kernel from another."""
    variants: dict[tuple[Any, ...], Any] = {}

    def typer(*arguments: Any) -> Any:
        if arguments not in variants:
            variants[arguments] = _compiled(kernel, arguments, None)
        return signature_of(variants[arguments].signature.return_type, *arguments)

    typer.__signature__ = inspect.signature(kernel.function)  # type: ignore[attr-defined]

    @_lower(kernel, types.VarArg(types.Any))
    def lowered(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        compiled = variants[signature.args]
        context.active_code_library.used.append(compiled.library)
        function = context.declare_function(builder.module, compiled.fndesc)
        status, value = context.call_conv.call_function(
            builder, function, signature.return_type, signature.args, arguments
        )
        with builder.if_then(status.is_error, likely=False):
            context.call_conv.return_status_propagate(builder, status)
        return value

    cpu_target.target_context.refresh()
    return types.Function(make_callable_template(kernel, typer))


def _object_file(library: _Library) -> bytes:
    module, seen, wanted = library._final_module, {library}, list(library.used)
    while wanted:
        other = wanted.pop()
        if other not in seen:
            seen.add(other)
            wanted += other.used
            module.link_in(other._final_module, preserve=True)
    for numbas in {known for own in seen for known in own._linking_libraries}:  # functions that numba itself wrote
        module.link_in(numbas._get_module_for_linking(), preserve=True)
    for function in module.functions:
        if not function.is_declaration and function.name not in ("anymamba_range", "anymamba_team"):
            function.linkage = "internal"
    machine = _native.target_machine()
    module.data_layout = str(machine.target_data)
    _optimise(library, module, machine)
    module.verify()
    outside = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")}
    if not outside <= set(_native.LIBC):
        raise RuntimeError(f"a kernel calls what it should not: {', '.join(sorted(outside - set(_native.LIBC)))}")
    return bytes(machine.emit_object(module))


def _optimise(library: _Library, module: Any, machine: Any) -> None:
    """Let LLVM work on the module: all it has but unrolling and interleaving, half of the time and no gain.

    Inner loops are of 32 lanes: vectors, and enough of them at once. Further copies run out of registers (scan 25 % slower).
    """
    if not hasattr(llvm, "create_pipeline_tuning_options"):  # an older llvmlite
        passes = library.codegen._module_pass_manager()
        passes.run(module)
        return
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.loop_unrolling = options.loop_interleaving = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _entries(library: Any, compiled: Any, kinds: list[Any]) -> Any:
    """Return a module with the two entries."""
    module = library.create_ir_module("entries")
    _team(module, _range(module, compiled, kinds))
    return module


def _range(module: Any, compiled: Any, kinds: list[Any]) -> Any:
    context, described = compiled.target_context, compiled.fndesc
    kernel = context.declare_function(module, described)
    words = _WORD.as_pointer()
    function = ir.Function(module, ir.FunctionType(_STATUS, [_WORD, _WORD, words]), "anymamba_range")
    builder = ir.IRBuilder(function.append_basic_block())
    first, after, block = function.args
    arguments = [first, after]
    for i, kind in enumerate(kinds):
        word = builder.load(builder.gep(block, [_WORD(_HEADER + i)]))
        arguments.append(_value(context, builder, kind, word))
    status, _ = context.call_conv.call_function(
        builder, kernel, described.restype, (types.int64, types.int64, *kinds), arguments
    )
    builder.ret(builder.select(status.is_ok, _STATUS(0), _STATUS(1)))
    return function


def _value(context: Any, builder: Any, kind: Any, word: Any) -> Any:
    """Return a word of the block as numba has values of this kind."""
    if isinstance(kind, types.Array):
        return _lowering.array(context, builder, kind, word, [context.get_constant(types.intp, _ENDLESS)])
    if kind is types.float64:
        return builder.bitcast(word, ir.DoubleType())
    if kind is types.boolean:
        return builder.icmp_signed("!=", word, _WORD(0))
    return word


def _team(module: Any, ranged: Any) -> None:
    words = _WORD.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [words]), "anymamba_team")
    builder = ir.IRBuilder(function.append_basic_block())
    (block,) = function.args
    items, parts = (builder.load(builder.gep(block, [_WORD(i)])) for i in (1, 2))
    take, work, failed, done = (function.append_basic_block() for _ in range(4))
    builder.branch(take)
    builder.position_at_end(take)
    part = builder.atomic_rmw("add", block, _WORD(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", part, parts), work, done)
    builder.position_at_end(work)
    first, after = (builder.sdiv(builder.mul(items, i), parts) for i in (part, builder.add(part, _WORD(1))))
    status = builder.call(ranged, [first, after, block])
    builder.cbranch(builder.icmp_signed("==", status, _STATUS(0)), take, failed)
    builder.position_at_end(failed)
    builder.store(builder.sext(status, _WORD), builder.gep(block, [_WORD(3)]))
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
