"""selective_scan_cuda as callers written for the compiled module use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from anymamba.errors import ShapeError
from anymamba.extensions import selective_scan_cuda
from anymamba.ops import selective_scan_fn
from oracle import GRADIENT_BOUND, OUTPUT_BOUND, relative_error


def draw_call(
    batch: int = 2, dim: int = 4, seqlen: int = 150, dstate: int = 3, dtype: torch.dtype = torch.float32,
    complex_A: bool = False,
) -> dict[str, Any]:  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    A = -torch.rand(dim, dstate, generator=generator) - 0.1
    columns = 2 * seqlen if complex_A else seqlen
    return {
        "u": tensor(batch, dim, seqlen),
        "delta": (0.3 * torch.rand(dim, batch, seqlen, generator=generator)).to(dtype).transpose(0, 1),
        "A": torch.complex(A, tensor(dim, dstate, dtype=torch.float32)) if complex_A else A,
        "B": tensor(batch, 2, dstate, columns),
        "C": tensor(batch, 2, dstate, columns),
        "D": tensor(dim, dtype=torch.float32),
        "z": tensor(batch, dim, seqlen),
        "delta_bias": 0.1 * tensor(dim, dtype=torch.float32),
    }


class OldScan(torch.autograd.Function):
    """A caller in the manner of every mamba_ssm: what fwd returns is saved and handed to bwd."""

    @staticmethod
    def forward(ctx: Any, u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any) -> Any:
        out, x, *rest = selective_scan_cuda.fwd(u, delta, A, B, C, D, z, delta_bias, True)
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, x, out)
        return rest[0] if rest else out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        u, delta, A, B, C, D, z, delta_bias, x, out = ctx.saved_tensors
        du, ddelta, dA, dB, dC, dD, ddelta_bias, *rest = selective_scan_cuda.bwd(
            u, delta, A, B, C, D, z, delta_bias, dout, x, out if z is not None else None, None, True, False
        )
        return du, ddelta, dA, dB, dC, dD, rest[0] if rest else None, ddelta_bias


@pytest.mark.parametrize("complex_A", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_old_autograd_function_gets_the_outputs_and_gradients_of_the_operator(
    dtype: torch.dtype, gated: bool, complex_A: bool
) -> None:
    call = draw_call(dtype=dtype, complex_A=complex_A)
    if not gated:
        call["z"] = None
    seen_inputs = {k: None if v is None else v.detach().requires_grad_() for k, v in call.items()}
    wanted_inputs = {
        k: None if v is None else v.detach().to(torch.complex128 if v.is_complex() else torch.float64).requires_grad_()
        for k, v in call.items()
    }
    seen = OldScan.apply(*seen_inputs.values())
    wanted = selective_scan_fn(**wanted_inputs, delta_softplus=True)
    assert seen.dtype == dtype
    assert relative_error(seen, wanted) <= OUTPUT_BOUND[dtype]
    weights = torch.randn_like(wanted)
    leaves = [value for value in seen_inputs.values() if value is not None]
    gradients = torch.autograd.grad(seen, leaves, weights.to(dtype))
    truths = torch.autograd.grad(wanted, [v for v in wanted_inputs.values() if v is not None], weights)
    for leaf, gradient, truth in zip(leaves, gradients, truths):
        assert gradient.dtype == leaf.dtype
        assert relative_error(gradient, truth) <= GRADIENT_BOUND[dtype]


def test_out_is_before_the_gate_in_the_layout_of_delta_and_out_z_after_it_in_that_of_z() -> None:
    call = draw_call()
    out, x, out_z = selective_scan_cuda.fwd(*call.values(), True)
    assert out.stride() == call["delta"].stride()
    assert out_z.stride() == call["z"].stride()
    torch.testing.assert_close(out_z, out * silu(call["z"]))
    assert x.shape == (2, 4, 1, 6)


@pytest.mark.parametrize("complex_A", [False, True])
@pytest.mark.parametrize("seqlen", [1, 2048, 4097])
def test_x_holds_at_each_chunks_end_the_decay_so_far_and_the_state(seqlen: int, complex_A: bool) -> None:
    call = draw_call(1, 2, seqlen, 2, complex_A=complex_A)
    _, x, _ = selective_scan_cuda.fwd(*call.values(), True)
    chunks = -(-seqlen // 2048)
    assert x.shape == (1, 2, chunks, 4)
    assert x.is_contiguous()
    assert x.dtype == call["A"].dtype
    step = torch.nn.functional.softplus(call["delta"] + call["delta_bias"][:, None])
    for chunk in range(chunks):
        end = min(seqlen, 2048 * (chunk + 1))
        part = {
            name: value[..., : 2 * end if complex_A and name in "BC" else end] if value.dim() > 2 else value
            for name, value in call.items()
        }
        _, state = selective_scan_fn(**part, delta_softplus=True, return_last_state=True)
        torch.testing.assert_close(x[:, :, chunk, 1::2], state)
        decay = torch.exp(step[..., :end].sum(-1)[..., None] * call["A"])
        torch.testing.assert_close(x[:, :, chunk, 0::2], decay, rtol=1e-3, atol=1e-6)


def test_the_backward_uses_the_states_behind_x_and_does_without_them_too() -> None:
    call = draw_call(1, 4, 2500, 2)
    out, x, _ = selective_scan_cuda.fwd(*call.values(), True)
    assert selective_scan_cuda._checkpoints_behind(x, call["u"], call["A"]) is not None
    assert selective_scan_cuda._checkpoints_behind(x.clone(), call["u"], call["A"]) is None
    dout = torch.randn(out.shape)
    results = [
        selective_scan_cuda.bwd(*call.values(), dout, given, out, None, True, False) for given in (x, x.clone(), None)
    ]
    for other in results[1:]:
        for seen, wanted in zip(other, results[0]):
            assert torch.equal(seen, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dz_is_written_where_the_caller_says_and_out_z_comes_back(dtype: torch.dtype) -> None:
    call = draw_call(dtype=dtype)
    out, x, out_z = selective_scan_cuda.fwd(*call.values(), True)
    dxz = torch.full((2, 8, 150), float("nan"), dtype=dtype)
    dz = dxz.chunk(2, dim=1)[1]
    dout = torch.randn(out.shape).to(dtype)
    *_, dz_seen, again = selective_scan_cuda.bwd(*call.values(), dout, x, out, dz, True, True)
    *_, wanted = selective_scan_cuda.bwd(*call.values(), dout, x, out, None, True, False)
    assert dz_seen is dz
    assert torch.equal(dxz[:, 4:], wanted)
    assert dxz[:, :4].isnan().all()
    assert relative_error(again, out_z) <= OUTPUT_BOUND[dtype]


def test_what_is_not_given_has_no_gradient() -> None:
    call = draw_call() | {"D": None, "z": None, "delta_bias": None}
    out, x = selective_scan_cuda.fwd(*call.values(), False)
    gradients = selective_scan_cuda.bwd(*call.values(), torch.ones_like(out), x, None, None, False, False)
    assert len(gradients) == 7
    assert gradients[5] is None
    assert gradients[6] is None


def test_it_works_under_autocast() -> None:
    call = {name: value.requires_grad_() for name, value in draw_call().items()}
    plain = OldScan.apply(*call.values())
    with torch.autocast("cpu", torch.bfloat16):
        under = OldScan.apply(*call.values())
        gradients = torch.autograd.grad(under.sum(), list(call.values()))
    assert torch.equal(plain, under)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain.sum(), list(call.values())))


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(ShapeError, match=r"B has shape \(2, 2, 4, 150\)"):
        selective_scan_cuda.fwd(*(draw_call() | {"B": torch.zeros(2, 2, 4, 150)}).values(), True)
