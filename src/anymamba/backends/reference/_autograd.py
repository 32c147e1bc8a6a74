"""The reference's backward: PyTorch's own autograd through the formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["gradients"]


def gradients(
    formula: Callable[..., torch.Tensor | tuple[torch.Tensor | None, ...]],
    inputs: Sequence[torch.Tensor | None],
    output_gradients: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of each floating input of `formula(*inputs)` (None for None or integer inputs).

    An input that does not influence the outputs has a zero gradient.
    """
    leaves = [
        tensor.detach().requires_grad_()
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex())
        else tensor
        for tensor in inputs
    ]
    with torch.enable_grad():
        outputs = formula(*leaves)
    if isinstance(outputs, torch.Tensor):
        outputs = (outputs,)
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, output_gradients)
        if output is not None and gradient is not None and output.requires_grad
    ]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = (
        torch.autograd.grad(
            [output for output, _ in pairs],
            wanted,
            [gradient.to(output.dtype) for output, gradient in pairs],
            allow_unused=True,
        )
        if pairs
        else [None] * len(wanted)
    )
    by_leaf = {
        id(leaf): torch.empty_like(leaf).copy_(gradient) if gradient is not None else torch.zeros_like(leaf)
        for leaf, gradient in zip(wanted, found)
    }
    return tuple(None if leaf is None else by_leaf.get(id(leaf)) for leaf in leaves)
