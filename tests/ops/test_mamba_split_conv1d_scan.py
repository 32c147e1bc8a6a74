"""mamba_split_conv1d_scan_combined and its reference against the same composition of float64 reference operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from anymamba.backends import use_backend
from anymamba.errors import DtypeError, OptionError, ShapeError
from anymamba.ops import mamba_split_conv1d_scan_combined, mamba_split_conv1d_scan_ref
from oracle import assert_matches_reference, outputs_and_gradients, relative_error, upcast

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make(
    batch: int = 2,
    seqlen: int = 9,
    heads: int = 4,
    headdim: int = 3,
    groups: int = 2,
    dstate: int = 4,
    nonssm: int = 0,
    out_dim: int | None = 5,
    norm: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    grad: bool = True,
) -> dict[str, object]:
    """Return arguments as a Mamba2 block passes them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    dim = heads * headdim
    conv = dim + 2 * groups * dstate

    def tensor(*shape: int, dtype: torch.dtype = wide) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    arguments: dict[str, object] = {
        "zxbcdt": tensor(batch, seqlen, 2 * nonssm + dim + conv + heads, dtype=dtype),
        "conv1d_weight": tensor(conv, 4),
        "conv1d_bias": tensor(conv),
        "dt_bias": tensor(heads),
        "A": -0.1 - tensor(heads).abs(),
        "D": tensor(heads),
        "rmsnorm_weight": tensor(dim) if norm else None,
        "outproj_weight": tensor(out_dim, nonssm + dim, dtype=dtype) if out_dim else None,
        "outproj_bias": tensor(out_dim, dtype=dtype) if out_dim else None,
    }
    if grad:
        for value in arguments.values():
            if isinstance(value, torch.Tensor):
                value.requires_grad_()
    return arguments | {"chunk_size": 8, "headdim": headdim, "ngroups": groups}


def composed(
    zxbcdt: torch.Tensor, A: torch.Tensor, D: torch.Tensor, headdim: int, ngroups: int, **rest: object
) -> torch.Tensor:
    """The block by plain PyTorch and a loop over time, for float64: what a Mamba-2 block is."""
    conv1d_weight, weight = rest["conv1d_weight"], rest["rmsnorm_weight"]
    heads, dim = D.shape[0], D.shape[0] * headdim
    columns, width = conv1d_weight.shape
    nonssm = (zxbcdt.shape[-1] - dim - columns - heads) // 2
    z0, x0, z, xBC, dt = zxbcdt.split([nonssm, nonssm, dim, columns, heads], dim=-1)
    padded = F.pad(xBC.transpose(1, 2), (width - 1, 0))
    xBC = F.silu(F.conv1d(padded, conv1d_weight[:, None], rest["conv1d_bias"], groups=columns)).transpose(1, 2)
    inner = (columns - dim) // 2
    x, B, C = xBC.split([dim, inner, inner], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    B, C = (t.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2) for t in (B, C))
    dt = F.softplus(dt + rest["dt_bias"])
    state, ys = 0, []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        ys.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    y = torch.stack(ys, dim=1).flatten(2)
    before = rest.get("norm_before_gate", True)
    if weight is None or not before:
        y = y * F.silu(z)
    if weight is not None:
        groups = y.unflatten(-1, (ngroups, -1))
        y = (groups / (groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(2) * weight
        y = y * F.silu(z) if before else y
    y = torch.cat([F.silu(z0) * x0, y], dim=-1)
    return y if rest["outproj_weight"] is None else F.linear(y, rest["outproj_weight"], rest["outproj_bias"])


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("nonssm", [0, 6])
@pytest.mark.parametrize("out_dim", [5, None])
def test_it_is_a_mamba2_block(norm: bool, norm_before_gate: bool, nonssm: int, out_dim: int | None) -> None:
    arguments = make(norm=norm, nonssm=nonssm, out_dim=out_dim)
    arguments["norm_before_gate"] = norm_before_gate
    wanted = outputs_and_gradients(composed, {k: v for k, v in arguments.items() if k != "chunk_size"}, 0)
    torch.testing.assert_close(outputs_and_gradients(mamba_split_conv1d_scan_combined, arguments, 0), wanted)
    torch.testing.assert_close(outputs_and_gradients(mamba_split_conv1d_scan_ref, arguments, 0), wanted)


@given(
    st.integers(0, 2), st.integers(0, 70), st.integers(1, 2), st.integers(1, 2), st.sampled_from([0, 4]),
    st.sampled_from([None, 6]), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([None, "silu", "swish"]), st.sampled_from(DTYPES), st.integers(0, 1000),
)  # fmt: skip
def test_any_call_matches_the_reference_forward_and_backward(
    batch: int,
    seqlen: int,
    groups: int,
    per_group: int,
    nonssm: int,
    out_dim: int | None,
    norm: bool,
    norm_before_gate: bool,
    states: bool,
    packed: bool,
    activation: str | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    # One step of one head a group: the norm takes all scale away, and the gradient of what only scales is rounding alone.
    assume(not (norm and seqlen == 1 and per_group == 1 and not states))
    heads, headdim, dstate = groups * per_group, 5, 3
    arguments = make(batch, seqlen, heads, headdim, groups, dstate, nonssm, out_dim, norm, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    if states:
        shape, wide = (batch, heads, headdim, dstate), torch.promote_types(dtype, torch.float32)
        arguments["initial_states"] = torch.randn(shape, generator=generator, dtype=wide).requires_grad_()
        arguments["return_final_states"] = True
        arguments["D"] = torch.randn(heads, headdim, generator=generator, dtype=wide).requires_grad_()
        arguments["headdim"] = None
        arguments["conv1d_bias"] = None
    if packed:
        arguments["seq_idx"] = torch.randint(0, 4, (batch, seqlen), generator=generator).sort(dim=1)[0].int()
    arguments |= {"norm_before_gate": norm_before_gate, "activation": activation, "dt_limit": (0.01, 2.03)}
    # Half-precision results between the steps are rounded, as upstream's are.
    bound = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}.get(dtype)
    assert_matches_reference(
        mamba_split_conv1d_scan_combined, arguments, dtype=dtype, output_bound=bound, gradient_bound=bound
    )


def test_training_through_final_states_alone() -> None:
    arguments = make() | {"return_final_states": True}
    wanted = None
    for backend in ("torch", "reference"):
        with use_backend(backend):
            final_states = mamba_split_conv1d_scan_combined(**arguments)[1]
            found = torch.autograd.grad(final_states.square().sum(), arguments["zxbcdt"])
        wanted = wanted or found
        torch.testing.assert_close(found, wanted)


def test_the_backward_keeps_the_inputs_and_one_number_a_row_and_group() -> None:
    arguments = make(seqlen=40, groups=2)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        mamba_split_conv1d_scan_combined(**arguments)
    own = {value.data_ptr() for value in arguments.values() if isinstance(value, torch.Tensor)}
    assert [tensor.numel() for tensor in kept if tensor.data_ptr() not in own] == [2 * 40 * 2]


def test_autocast_casts_the_out_projection_and_nothing_else() -> None:
    arguments = make(dtype=torch.float32, seqlen=20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mamba_split_conv1d_scan_combined(**arguments)
        found = torch.autograd.grad(out.sum(), [arguments["zxbcdt"], arguments["outproj_weight"]])
    assert out.dtype == torch.bfloat16
    assert [gradient.dtype for gradient in found] == [torch.float32, torch.float32]
    inner = arguments | {"outproj_weight": None, "outproj_bias": None}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_matches_reference(mamba_split_conv1d_scan_combined, inner, dtype=torch.float32, gradient_bound=1e-4)
    exact = mamba_split_conv1d_scan_combined(**{k: upcast(v) for k, v in arguments.items()})
    assert relative_error(out, exact) < 1e-2


def test_torch_compile_gives_what_eager_gives() -> None:
    arguments = make(dtype=torch.float32, nonssm=4)
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    tensors = [arguments[name] for name in names]

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = mamba_split_conv1d_scan_combined(**(arguments | dict(zip(names, tensors))))
        return out * 2

    eager = step(*tensors)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), tensors), torch.autograd.grad(eager.sum(), tensors), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"zxbcdt": torch.zeros(2, 45)}, ShapeError, "zxbcdt has shape (2, 45)"),
        ({"zxbcdt": torch.zeros(2, 9, 43)}, ShapeError, "zxbcdt has width 43"),
        ({"conv1d_weight": torch.zeros(27, 4)}, ShapeError, "conv1d_weight has 27 rows"),
        ({"conv1d_bias": torch.zeros(27)}, ShapeError, "conv1d_bias has shape (27,)"),
        ({"headdim": None}, OptionError, "headdim is None"),
        ({"ngroups": 3}, OptionError, "ngroups is 3"),
        ({"A": torch.zeros(3)}, ShapeError, "A has shape (3,)"),
        ({"rmsnorm_weight": torch.zeros(4)}, ShapeError, "rmsnorm_weight has shape (4,)"),
        ({"outproj_weight": torch.zeros(5, 13)}, ShapeError, "outproj_weight has shape (5, 13)"),
        ({"outproj_weight": None}, OptionError, "outproj_weight is None"),
        ({"outproj_weight": torch.zeros(5, 12).half()}, DtypeError, "outproj_weight has dtype torch.float16"),
        ({"activation": "relu"}, OptionError, "activation is 'relu'"),
        ({"chunk_size": 0}, OptionError, "chunk_size is 0"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(
    change: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        mamba_split_conv1d_scan_combined(**(make(dtype=torch.float32, grad=False) | change))
    assert words in str(caught.value)
