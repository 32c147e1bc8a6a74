"""What kernels may call besides numba's language, as LLVM instructions: the functions of `_math` and the memory of `_scratch`.

Written out rather than compiled from Python: a function that numba compiles on its own costs 50 ms whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, type_callable
from numba.np import arrayobj

from anymamba.backends.cpu import _math, _scratch

__all__ = ["array"]

_lower: Any = lower_builtin
_type: Any = type_callable
_WORD = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_FLOAT, _DOUBLE, _INT = ir.FloatType(), ir.DoubleType(), ir.IntType(32)
_LINE = 64  # bytes of a cache line, and of the widest register


def array(context: Any, builder: Any, kind: Any, address: Any, shape: Sequence[Any]) -> Any:
    """Return numba's array of type `kind` (C order) at an address."""
    made = arrayobj.make_array(kind)(context, builder)
    element = context.get_data_type(kind.dtype)
    size = context.get_constant(types.intp, context.get_abi_sizeof(element))
    strides = [size]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.inttoptr(address, element.as_pointer())
    arrayobj.populate_array(made, data=data, shape=list(shape), strides=strides, itemsize=size, meminfo=None)
    return made._getvalue()


# --- _scratch: a chain of blocks; the first word of each is the address of the one before


@_type(_scratch.begin)
def _begin_type(context: Any) -> Any:
    return lambda: types.intp


@_lower(_scratch.begin)
def _begin(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    newest = cgutils.alloca_once(builder, _WORD)
    builder.store(_WORD(0), newest)
    return builder.ptrtoint(newest, _WORD)


@_type(_scratch.buffer)
def _buffer_type(context: Any) -> Any:
    def typed(scratch: Any, shape: Any, like: Any) -> Any:
        if isinstance(shape, types.BaseTuple) and isinstance(like, types.Array):
            return types.Array(like.dtype, len(shape), "C")
        return types.Array(like.dtype, 1, "C") if isinstance(shape, types.Integer) else None

    return typed


@_lower(_scratch.buffer, types.Any, types.Any, types.Any)
def _buffer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    scratch, shape, _ = arguments
    shape_type = signature.args[1]
    if isinstance(shape_type, types.BaseTuple):
        lengths = [
            context.cast(builder, length, kind, types.intp)
            for length, kind in zip(cgutils.unpack_tuple(builder, shape), tuple(signature.args[1]))
        ]
    else:
        lengths = [context.cast(builder, shape, shape_type, types.intp)]
    size = _WORD(context.get_abi_sizeof(context.get_data_type(signature.return_type.dtype)))
    for length in lengths:
        size = builder.mul(size, length)
    malloc = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_BYTES, [_WORD]), "malloc")
    block = builder.ptrtoint(builder.call(malloc, [builder.add(size, _WORD(2 * _LINE))]), _WORD)
    with builder.if_then(builder.icmp_signed("==", block, _WORD(0)), likely=False):
        context.call_conv.return_user_exc(builder, MemoryError, ())
    newest = builder.inttoptr(scratch, _WORD.as_pointer())
    builder.store(builder.load(newest), builder.inttoptr(block, _WORD.as_pointer()))
    builder.store(block, newest)
    start = builder.and_(builder.add(block, _WORD(2 * _LINE - 1)), _WORD(-_LINE))
    return array(context, builder, signature.return_type, start, lengths)


@_type(_scratch.end)
def _end_type(context: Any) -> Any:
    return lambda scratch: types.none


@_lower(_scratch.end, types.intp)
def _end(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    free = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [_BYTES]), "free")
    newest = builder.inttoptr(arguments[0], _WORD.as_pointer())
    test, work, done = (builder.append_basic_block(name) for name in ("test", "free", "freed"))
    builder.branch(test)
    builder.position_at_end(test)
    block = builder.load(newest)
    builder.cbranch(builder.icmp_signed("==", block, _WORD(0)), done, work)
    builder.position_at_end(work)
    builder.store(builder.load(builder.inttoptr(block, _WORD.as_pointer())), newest)
    builder.call(free, [builder.inttoptr(block, _BYTES)])
    builder.branch(test)
    builder.position_at_end(done)
    return context.get_dummy_value()


# --- _math: float32 by polynomials, float64 by the C library


def _known(function: Callable[..., Any], single: Callable[..., Any], double: Callable[..., Any]) -> None:
    """Make a function of one float known to numba."""

    @_type(function)
    def typed(context: Any) -> Any:
        return lambda x: x if x in (types.float32, types.float64) else None

    for kind, build in ((types.float32, single), (types.float64, double)):

        @_lower(function, kind)
        def lowered(context: Any, builder: Any, signature: Any, arguments: Any, build: Any = build) -> Any:
            return build(builder, arguments[0])


def _called(builder: Any, name: str, x: Any) -> Any:
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type]), name), [x])


def _horner(builder: Any, x: Any, coefficients: Sequence[float]) -> Any:
    """Return the polynomial with these coefficients, the highest power's first."""
    value = x.type(coefficients[0])
    for coefficient in coefficients[1:]:
        value = builder.fadd(builder.fmul(value, x), x.type(coefficient))
    return value


def _exp2_single(builder: Any, x: Any) -> Any:
    # NaN fails both comparisons and passes through; the clamps make n + 127 a valid exponent field (0: zero, 255: inf).
    y = builder.select(builder.fcmp_ordered("<", x, _FLOAT(-127)), _FLOAT(-127), x)
    y = builder.select(builder.fcmp_ordered(">", y, _FLOAT(128)), _FLOAT(128), y)
    n = _called(builder, "llvm.rint.f32", y)
    power = _horner(builder, builder.fsub(y, n), _math.EXP2)
    exponent = builder.shl(builder.add(builder.fptosi(n, _INT), _INT(127)), _INT(23))
    return builder.fmul(power, builder.bitcast(exponent, _FLOAT))


def _exp2_double(builder: Any, x: Any) -> Any:
    return _called(builder, "llvm.exp.f64", builder.fmul(x, _DOUBLE(_math.LN2)))


def _exp_single(builder: Any, x: Any) -> Any:
    return _exp2_single(builder, builder.fmul(x, _FLOAT(_math.LOG2E_SINGLE)))


def _sigmoid_single(builder: Any, x: Any) -> Any:
    return builder.fdiv(_FLOAT(1), builder.fadd(_FLOAT(1), _exp_single(builder, _negative(builder, x))))


def _sigmoid_double(builder: Any, x: Any) -> Any:
    power = _called(builder, "llvm.exp.f64", _negative(builder, x))
    return builder.fdiv(_DOUBLE(1), builder.fadd(_DOUBLE(1), power))


def _softplus_single(builder: Any, x: Any) -> Any:
    e = _exp_single(builder, _negative(builder, _called(builder, "llvm.fabs.f32", x)))
    s = builder.fdiv(e, builder.fadd(_FLOAT(2), e))
    q = builder.fmul(s, s)
    log1p = builder.fmul(s, builder.fadd(builder.fmul(_horner(builder, q, _math.ATANH), q), _FLOAT(2)))
    return builder.fadd(_positive(builder, x), log1p)


def _softplus_double(builder: Any, x: Any) -> Any:
    e = _called(builder, "llvm.exp.f64", _negative(builder, _called(builder, "llvm.fabs.f64", x)))
    return builder.fadd(_positive(builder, x), _called(builder, "log1p", e))


def _negative(builder: Any, x: Any) -> Any:
    return builder.fsub(x.type(-0.0), x)


def _positive(builder: Any, x: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, x.type(0)), x, x.type(0))


_known(_math.exp2, _exp2_single, _exp2_double)
_known(_math.sigmoid, _sigmoid_single, _sigmoid_double)
_known(_math.softplus, _softplus_single, _softplus_double)


for _function, _relation in ((_math.least, "<"), (_math.most, ">")):

    @_type(_function)
    def _whole(context: Any) -> Any:
        return lambda a, b: types.int64 if isinstance(a, types.Integer) and isinstance(b, types.Integer) else None

    @_lower(_function, types.Integer, types.Integer)
    def _chosen(context: Any, builder: Any, signature: Any, arguments: Any, relation: str = _relation) -> Any:
        a, b = (context.cast(builder, x, kind, types.int64) for x, kind in zip(arguments, signature.args))
        return builder.select(builder.icmp_signed(relation, a, b), a, b)
