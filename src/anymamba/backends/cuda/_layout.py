"""Which layout each CUDA kernel reads fastest, in words; the kernels' own conditions, asked without a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["path"]

Answer = tuple[str, list[str]]


def path(operator: str, tensors: Mapping[str, Any]) -> Answer:
    """Return the path in words and what to change for a faster one.

    Parameters
    ----------
    operator : str
    tensors : mapping of `anymamba.ops.layout.TensorLayout`
        The caller's arguments by name.
    """
    if operator == "causal_conv1d" and "x" in tensors:
        return _convolution(tensors["x"])
    if operator == "selective_scan" and {"u", "delta"} <= set(tensors):
        return _scan(tensors)
    if operator == "selective_state_update" and "state" in tensors:
        return _update(tensors)
    if operator == "ssd" and {"x", "B", "C"} <= set(tensors):
        return _dual_scan(tensors)
    if operator in ("layer_norm", "layernorm_gated", "swiglu"):
        return _rows(tensors)
    return "a kernel that takes any strides", []


def _convolution(x: Any) -> Answer:
    from anymamba.backends.cuda.causal_conv1d import Facts, _aligned, _channels

    facts = Facts(x.shape, x.strides, getattr(torch, x.dtype), x.past)
    each = _channels(facts)
    if each == 4:
        return "channel last: a thread reads 4 neighbouring channels at once", []
    vector = _VECTOR[x.dtype]
    if each == 1:
        advice = []
        if x.shape[1] % 4:
            advice.append(f"x: dimension 1 (channels) has {x.shape[1]}; a multiple of 4 is read four at a time")
        advice += _misaligned("x", x, (0, 2), 4)
        if x.strides[1] != 1:
            advice.append(f"x: stride {x.strides[1]} along dimension 1; 1 lets threads read neighbours")
        return "channel last: a thread reads one channel", advice
    if _aligned(1, facts):
        return "rows: 16 bytes at a time", []
    advice = _misaligned("x", x, (0, 1), vector)
    if x.strides[2] != 1:
        advice.append(
            f"x: stride {x.strides[2]} along dimension 2 (time); 1 (or channels side by side) is read fastest"
        )
    if x.shape[2] % vector:
        advice.append(f"x: dimension 2 (time) has {x.shape[2]}; a multiple of {vector} is read without a rest")
    return "rows: their ends or starts lie within 16 bytes, so edges are read one by one", advice


def _scan(tensors: Mapping[str, Any]) -> Answer:
    from anymamba.backends.cuda.selective_scan import Key, _packed

    slow, advice = [], []
    for name in ("u", "delta", "z", "B", "C"):
        tensor = tensors.get(name)
        if tensor is None or len(tensor.shape) < 3:
            continue
        vector = _VECTOR.get(tensor.dtype, 4)
        if not _packed(Key(tensor.shape, tensor.strides, getattr(torch, tensor.dtype), tensor.past), vector):
            slow.append(name)
            if tensor.strides[-1] != 1:
                advice.append(
                    f"{name}: stride {tensor.strides[-1]} along its last dimension (time); 1 is read fastest "
                    f"({name}.contiguous(), or make it so where it comes from)"
                )
            advice += _misaligned(name, tensor, tuple(range(len(tensor.shape) - 1)), vector)
    if not slow:
        return "all inputs are read 16 bytes at a time", []
    return f"{', '.join(slow)} read element by element", advice


def _update(tensors: Mapping[str, Any]) -> Answer:
    from anymamba.backends.cuda.selective_state_update import _vectors

    names = [name for name in ("state", "A", "B", "C") if name in tensors]
    keys = [
        (tensors[name].shape, tensors[name].strides, getattr(torch, tensors[name].dtype), tensors[name].past)
        for name in names
        if name != "A" or tensors["A"].strides[-1] != 0
    ]
    state = tensors["state"]
    if _vectors(keys, state.shape[-1], getattr(torch, state.dtype)):
        return "states are read and written 16 bytes at a time", []
    advice = []
    for name in names:
        tensor, vector = tensors[name], _VECTOR[tensors[name].dtype]
        if tensor.strides[-1] not in (0, 1):
            advice.append(f"{name}: stride {tensor.strides[-1]} along its last dimension (states); 1 is read fastest")
        advice += _misaligned(name, tensor, tuple(range(len(tensor.shape) - 1)), vector)
    if state.shape[-1] % _VECTOR[state.dtype]:
        advice.append(
            f"state: {state.shape[-1]} states; a multiple of {_VECTOR[state.dtype]} is read 16 bytes at a time"
        )
    return "states are read and written one by one", advice


def _dual_scan(tensors: Mapping[str, Any]) -> Answer:
    from anymamba.backends.cuda.ssd import Key, _packed

    dtypes = {getattr(torch, tensors[name].dtype) for name in ("x", "B", "C")}
    advice = []
    if len(dtypes) > 1:
        advice.append("x, B and C: of different dtypes, so copies are made; one dtype for all is read as it is")
    for name, wanted in (("x", 0), ("B", 0), ("C", 0), ("z", 4)):
        tensor = tensors.get(name)
        if tensor is None:
            continue
        vector = wanted or _VECTOR.get(tensor.dtype, 4)
        last = tensor.shape[-1]
        if last % vector:
            advice.append(f"{name}: its last dimension has {last}; a multiple of {vector} is read 16 bytes at a time")
        if not _packed(Key(tensor.shape, tensor.strides, getattr(torch, tensor.dtype), tensor.past), vector):
            if tensor.strides[-1] != 1:
                advice.append(f"{name}: stride {tensor.strides[-1]} along its last dimension; 1 is read fastest")
            advice += _misaligned(name, tensor, tuple(range(len(tensor.shape) - 1)), vector)
    if advice:
        return "chunks read element by element where they are not whole groups of 16 bytes", advice
    return "chunks are read 16 bytes at a time", []


def _rows(tensors: Mapping[str, Any]) -> Answer:
    advice = []
    for name in ("x", "residual", "z", "x1", "xy"):
        tensor = tensors.get(name)
        if tensor is None or not tensor.shape:
            continue
        vector = _VECTOR.get(tensor.dtype, 4)
        if tensor.strides[-1] != 1 and tensor.shape[-1] > 1:
            advice.append(
                f"{name}: stride {tensor.strides[-1]} along its last dimension, so it is copied; 1 is read as it is"
            )
            continue
        columns = tensor.shape[-1] // (2 if name == "xy" else 1)
        if columns % vector:
            advice.append(f"{name}: {columns} columns; a multiple of {vector} is read 16 bytes at a time")
        advice += _misaligned(name, tensor, tuple(range(len(tensor.shape) - 1)), vector)
    if advice:
        return "rows read column by column", advice
    return "rows are read 16 bytes at a time", []


_VECTOR = {"float32": 4, "float16": 8, "bfloat16": 8, "float64": 2}


def _misaligned(name: str, tensor: Any, dimensions: tuple[int, ...], multiple: int) -> list[str]:
    lines = [
        f"{name}: stride {tensor.strides[dim]} along dimension {dim} is no multiple of {multiple}"
        for dim in dimensions
        if tensor.strides[dim] % multiple and tensor.shape[dim] > 1 and tensor.strides[dim] != 1
    ]
    if tensor.past:
        lines.append(f"{name}: begins {tensor.past} bytes past a multiple of 16 (a slice?)")
    return lines
