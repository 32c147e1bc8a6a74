"""mamba_chunk_scan_combined and mamba_chunk_scan against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymamba.backends import use_backend
from anymamba.backends.torch import ssd as torch_ssd
from anymamba.errors import DeviceError, DtypeError, OptionError, ShapeError
from anymamba.ops import mamba_chunk_scan, mamba_chunk_scan_combined
from checks import opcheck
from oracle import CPU_BACKENDS, assert_matches_reference, outputs_and_gradients, upcast

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
CHUNK = torch_ssd.CHUNK


def make(
    batch: int,
    seqlen: int,
    heads: int = 2,
    headdim: int = 3,
    groups: int = 1,
    dstate: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    decay: float = 1.0,
    grad: bool = True,
) -> dict[str, object]:
    """Return the arguments that every call has; A, D and dt_bias are parameters, float32 or wider."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    wide = torch.promote_types(dtype, torch.float32)
    arguments: dict[str, object] = {
        "x": tensor(batch, seqlen, heads, headdim),
        "dt": tensor(batch, seqlen, heads),
        "A": -decay * (0.1 + tensor(heads, dtype=wide).abs()),
        "B": tensor(batch, seqlen, groups, dstate),
        "C": tensor(batch, seqlen, groups, dstate),
        "chunk_size": 16,
        "D": tensor(heads, dtype=wide),
        "dt_bias": tensor(heads, dtype=wide),
        "dt_softplus": True,
        "initial_states": tensor(batch, heads, headdim, dstate, dtype=wide),
    }
    if grad:
        for value in arguments.values():
            if isinstance(value, torch.Tensor):
                value.requires_grad_()
    return arguments


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return seq_idx (1, total) and cu_seqlens of sequences of these lengths."""
    seq_idx = torch.cat([torch.full((1, n), i, dtype=torch.int32) for i, n in enumerate(lengths)], dim=1)
    return seq_idx, torch.tensor([0, *lengths]).cumsum(0).int()


def relaid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in another memory layout."""
    detached = tensor.detach()
    if layout == "slice":  # of a wider projection, as Mamba2 makes its inputs
        detached = torch.cat([detached, detached], dim=-1)[..., : tensor.shape[-1]]
    elif layout == "time last":
        order = (0, *range(2, tensor.dim()), 1)
        back = (0, tensor.dim() - 1, *range(1, tensor.dim() - 1))
        detached = detached.permute(order).contiguous().permute(back)
    elif layout == "every second":
        detached = detached.repeat_interleave(2, dim=1)[:, ::2]
    return detached.requires_grad_()


@st.composite
def scans(draw: st.DrawFn) -> dict[str, object]:
    """Draw arguments of mamba_chunk_scan_combined: any layout, any options, lengths around the chunk."""
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch = draw(st.sampled_from([0, 1, 1, 2, 3]))
    seqlen = draw(st.one_of(st.integers(0, 20), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])))
    heads, headdim, dstate = groups * per_group, draw(st.integers(1, 9)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**31))
    arguments = make(
        batch, seqlen, heads, headdim, groups, dstate, dtype, seed, draw(st.sampled_from([0.1, 1.0, 20.0]))
    )
    for name in ("x", "dt", "B", "C"):
        layout = draw(st.sampled_from(["plain", "slice", "time last", "every second"]))
        arguments[name] = relaid(arguments[name], layout)
    generator = torch.Generator().manual_seed(seed)
    if draw(st.booleans()):
        arguments["z"] = torch.randn(batch, seqlen, heads, headdim, generator=generator).to(dtype).requires_grad_()
    if draw(st.booleans()):
        wide = arguments["A"].dtype
        arguments["D"] = torch.randn(heads, headdim, generator=generator, dtype=wide).requires_grad_()
    for name in ("D", "dt_bias", "initial_states"):
        if draw(st.booleans()):
            arguments[name] = None
    if draw(st.booleans()):
        arguments["dt_softplus"] = False
    # A gradient is not the same on both sides of a clamp: keep half-precision inputs off its edges.
    arguments["dt_limit"] = draw(st.sampled_from([(0.0, float("inf")), (0.0113, 0.7109)]))
    arguments["return_final_states"] = draw(st.booleans())
    if draw(st.booleans()):
        if batch == 1 and seqlen and draw(st.booleans()):
            cuts = sorted({0, seqlen, *draw(st.lists(st.integers(0, seqlen), max_size=5))})
            arguments["seq_idx"], cu_seqlens = packed([b - a for a, b in zip(cuts[:-1], cuts[1:])])
            # an empty sequence in the middle has a state too: zero
            arguments["cu_seqlens"] = torch.cat([cu_seqlens[:2], cu_seqlens[1:]])
            arguments["return_varlen_states"] = True
        else:
            arguments["seq_idx"] = torch.randint(-1, 4, (batch, seqlen), generator=generator).sort(dim=1)[0]
    return arguments


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@given(arguments=scans(), block_bytes=st.sampled_from([1, 1 << 26]))
def test_any_call_matches_the_reference_forward_and_backward(
    backend: str, arguments: dict[str, object], block_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(torch_ssd.BLOCK_BYTES, "cpu", block_bytes)  # 1: a block a chunk, a row of the batch at a time
        # A has as few as one element: its gradient is one sum, which may be near zero. The next test is the strict one.
        bound = 1e-4 if arguments["x"].dtype == torch.float32 else None
        assert_matches_reference(mamba_chunk_scan_combined, arguments, backend=backend, gradient_bound=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_at_a_real_size_are_those_of_rounding_the_results(dtype: torch.dtype) -> None:
    arguments = make(1, 256, heads=4, headdim=64, groups=1, dstate=64, dtype=dtype) | {"return_final_states": True}
    output = {torch.float32: 5e-7, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}[dtype]
    for backend in CPU_BACKENDS:
        assert_matches_reference(
            mamba_chunk_scan_combined, arguments, backend=backend, output_bound=output, gradient_bound=2 * output
        )


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("varlen", [True, False])
def test_gradients_are_those_of_finite_differences(backend: str, varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ssd, "CHUNK", 2)
    batch, lengths = (1, [1, 3, 1]) if varlen else (1, [5])
    arguments = make(batch, sum(lengths), heads=2, headdim=2, groups=2, dstate=1)
    arguments["D"] = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    arguments["z"] = torch.randn(batch, sum(lengths), 2, 2, dtype=torch.float64, requires_grad=True)
    arguments["return_final_states"] = True
    if varlen:
        arguments["seq_idx"], arguments["cu_seqlens"] = packed(lengths)
        arguments["return_varlen_states"] = True
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.requires_grad]

    def run(*tensors: torch.Tensor) -> object:
        return mamba_chunk_scan_combined(**{**arguments, **dict(zip(names, tensors))})

    with use_backend(backend):
        assert torch.autograd.gradcheck(run, [arguments[name] for name in names])


@pytest.mark.parametrize("cut", [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_a_sequence_cut_anywhere_and_continued_with_states_equals_the_whole_also_in_training(cut: int) -> None:
    arguments = make(2, 2 * CHUNK + 3, groups=2)
    timed = ("x", "dt", "B", "C")

    def whole(**tensors: torch.Tensor) -> object:
        return mamba_chunk_scan_combined(**{**arguments, **tensors}, return_final_states=True)

    def halves(**tensors: torch.Tensor) -> object:
        now = {**arguments, **tensors}
        head = {**now, **{name: now[name][:, :cut] for name in timed}}
        first, state = mamba_chunk_scan_combined(**head, return_final_states=True)
        tail = {**now, **{name: now[name][:, cut:] for name in timed}, "initial_states": state}
        second, end = mamba_chunk_scan_combined(**tail, return_final_states=True)
        return torch.cat([first, second], dim=1), end

    leaves = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    seen, wanted = outputs_and_gradients(halves, leaves, seed=1), outputs_and_gradients(whole, leaves, seed=1)
    torch.testing.assert_close(seen, wanted)


def test_packed_sequences_equal_separate_ones_and_their_states_are_the_varlen_states() -> None:
    lengths = [1, 5, CHUNK, 2, CHUNK + 9]
    arguments = make(1, sum(lengths), groups=2, grad=False) | {"initial_states": None}
    seq_idx, cu_seqlens = packed(lengths)
    out, states = mamba_chunk_scan_combined(
        **arguments, seq_idx=seq_idx, cu_seqlens=cu_seqlens, return_varlen_states=True
    )
    bounds = cu_seqlens.tolist()
    for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        alone = arguments | {name: arguments[name][:, start:end] for name in ("x", "dt", "B", "C")}
        y, state = mamba_chunk_scan_combined(**alone, return_final_states=True)
        torch.testing.assert_close(out[:, start:end], y)
        torch.testing.assert_close(states[i], state[0])


def test_initial_states_belong_to_the_first_sequence_alone() -> None:
    arguments = make(1, 9, grad=False)
    seq_idx, cu_seqlens = packed([4, 5])
    out, states = mamba_chunk_scan_combined(
        **arguments, seq_idx=seq_idx + 7, cu_seqlens=cu_seqlens, return_varlen_states=True
    )
    for start, end, initial in ((0, 4, arguments["initial_states"]), (4, 9, None)):
        part = {name: arguments[name][:, start:end] for name in ("x", "dt", "B", "C")}
        y, state = mamba_chunk_scan_combined(
            **(arguments | part | {"initial_states": initial}), return_final_states=True
        )
        torch.testing.assert_close(out[:, start:end], y)
        torch.testing.assert_close(states[int(start > 0)], state[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strong_decay_neither_overflows_nor_loses_its_small_gradients(dtype: torch.dtype) -> None:
    arguments = make(1, 3 * CHUNK, heads=3, headdim=4, dtype=dtype, decay=1000.0)
    with torch.no_grad():
        arguments["A"][0] = -1e-4  # beside a head that forgets nothing
    for backend in CPU_BACKENDS:
        assert_matches_reference(mamba_chunk_scan_combined, arguments | {"return_final_states": True}, backend=backend)


def test_chunk_size_changes_nothing() -> None:
    arguments = make(2, 100, grad=False)
    outs = [mamba_chunk_scan_combined(**(arguments | {"chunk_size": size})) for size in (1, 7, 64, 256)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_results_have_upstreams_order_shapes_and_dtypes() -> None:
    arguments = make(1, 10, heads=4, headdim=3, groups=2, dstate=5, dtype=torch.bfloat16, grad=False)
    seq_idx, cu_seqlens = packed([4, 6])
    call = arguments | {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
    assert isinstance(mamba_chunk_scan_combined(**call), torch.Tensor)
    out, final, varlen = mamba_chunk_scan_combined(**call, return_final_states=True, return_varlen_states=True)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((1, 10, 4, 3), torch.bfloat16, True)
    assert (final.shape, final.dtype) == ((1, 4, 3, 5), torch.float32)
    assert (varlen.shape, varlen.dtype) == ((2, 4, 3, 5), torch.bfloat16)
    assert len(mamba_chunk_scan_combined(**call, return_varlen_states=True)) == 2


def test_final_states_of_no_tokens_are_the_initial_states() -> None:
    arguments = make(2, 0, grad=False)
    out, final = mamba_chunk_scan_combined(**arguments, return_final_states=True)
    assert out.shape == (2, 0, 2, 3)
    assert torch.equal(final, arguments["initial_states"])


def test_mamba_chunk_scan_lets_negative_steps_through() -> None:
    arguments = make(1, 70) | {"dt_bias": None, "dt_softplus": False}
    del arguments["initial_states"]
    assert_matches_reference(mamba_chunk_scan, arguments)
    clamped = mamba_chunk_scan_combined(**arguments)
    assert not torch.allclose(mamba_chunk_scan(**arguments), clamped)


def test_autocast_rounds_nothing_inside() -> None:
    arguments = make(1, 20, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_matches_reference(mamba_chunk_scan_combined, arguments)


def test_the_backward_keeps_only_the_inputs() -> None:
    arguments = make(1, 130, dtype=torch.float32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        mamba_chunk_scan_combined(**arguments)
    given_storages = {value.data_ptr() for value in arguments.values() if isinstance(value, torch.Tensor)}
    assert {tensor.data_ptr() for tensor in kept} <= given_storages


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"x": torch.zeros(1, 6, 4)},
            ShapeError,
            "x has shape (1, 6, 4), but must be (batch, seqlen, nheads, headdim)",
        ),
        ({"x": torch.zeros(1, 6, 2, 3, dtype=torch.int64)}, DtypeError, "x has dtype torch.int64"),
        ({"dt": torch.zeros(1, 6, 3)}, ShapeError, "dt has shape (1, 6, 3)"),
        ({"A": torch.zeros(2, 4)}, ShapeError, "A has shape (2, 4)"),
        ({"B": torch.zeros(1, 5, 1, 4)}, ShapeError, "B has shape (1, 5, 1, 4)"),
        ({"B": torch.zeros(1, 6, 3, 4), "C": torch.zeros(1, 6, 3, 4)}, ShapeError, "B has 3 groups"),
        ({"C": torch.zeros(1, 6, 2, 4)}, ShapeError, "C has shape (1, 6, 2, 4)"),
        ({"D": torch.zeros(3)}, ShapeError, "D has shape (3,)"),
        ({"z": torch.zeros(1, 6, 2, 4)}, ShapeError, "z has shape (1, 6, 2, 4)"),
        ({"dt_bias": torch.zeros(3)}, ShapeError, "dt_bias has shape (3,)"),
        ({"initial_states": torch.zeros(1, 2, 4, 3)}, ShapeError, "initial_states has shape (1, 2, 4, 3)"),
        ({"seq_idx": torch.zeros(1, 6)}, DtypeError, "seq_idx has dtype torch.float32"),
        ({"A": torch.zeros(2, device="meta")}, DeviceError, "A is on meta"),
        ({"chunk_size": 0}, OptionError, "chunk_size is 0"),
        ({"return_varlen_states": True}, OptionError, "cu_seqlens is None"),
        ({"dt_limit": (0.0,)}, OptionError, "dt_limit is (0.0,)"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(
    change: dict[str, object], error: type[Exception], words: str
) -> None:
    arguments = make(1, 6, dtype=torch.float32, grad=False) | change
    with pytest.raises(error) as caught:
        mamba_chunk_scan_combined(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("full", [True, False])
def test_operators_pass_opcheck(full: bool) -> None:
    arguments = make(1, 9, heads=4, groups=2, dtype=torch.float32, seed=3)
    x, dt, A, B, C = (arguments[name] for name in ("x", "dt", "A", "B", "C"))
    optional = (None,) * 6
    if full:
        seq_idx, cu_seqlens = packed([4, 5])
        z = torch.randn_like(x).requires_grad_()
        optional = (arguments["D"], z, arguments["dt_bias"], arguments["initial_states"], seq_idx, cu_seqlens)
    inputs = (x, dt, A, B, C, *optional, True, 0.0, float("inf"))
    opcheck(torch.ops.anymamba.ssd, (*inputs, full))
    detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
    states = (torch.randn(1, 4, 3, 4), torch.randn(2, 4, 3, 4)) if full else (None, None)
    opcheck(torch.ops.anymamba.ssd_backward, (torch.randn(1, 9, 4, 3), *states, *detached))


def test_torch_compile_and_export_give_what_eager_gives() -> None:
    arguments = make(1, 12, dtype=torch.float32)
    names = ("x", "dt", "A", "B", "C", "D")
    tensors = tuple(arguments[name] for name in names)

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        out, final = mamba_chunk_scan_combined(**(arguments | dict(zip(names, tensors))), return_final_states=True)
        return out * 2 + final.sum()

    eager = step(*tensors)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), tensors), torch.autograd.grad(eager.sum(), tensors), rtol=1e-5, atol=1e-5
    )

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = mamba_chunk_scan(*tensors[:5], 64, D=tensors[5])
            return out

    plain = tuple(tensor.detach() for tensor in tensors)
    exported = torch.export.export(Module(), plain)
    torch.testing.assert_close(exported.module()(*plain), Module()(*plain))


def test_reference_and_torch_agree_on_the_output_again_and_on_buffers() -> None:
    arguments = make(2, 70, heads=4, groups=2, grad=False)
    x, dt, A, B, C = (upcast(arguments[name]) for name in ("x", "dt", "A", "B", "C"))
    z, dout = torch.randn_like(x), torch.randn_like(x)
    from anymamba.ops.ssd import SsdBuffers, _backward, _forward

    inputs = (x, dt, A, B, C, None, z, None, None, None, None, True, 0.0, float("inf"))
    out = _forward(*inputs, False)[0]
    for backend in ("torch", "reference"):
        wide = torch.full((2, 70, 3, *x.shape[2:]), float("nan"), dtype=torch.float64)
        buffers = SsdBuffers(dx=wide[:, :, 0], dz=wide[:, :, 2])
        with use_backend(backend):
            found = _backward(dout, None, None, *inputs, into=buffers, recompute_out=True)
            plain = _backward(dout, None, None, *inputs)
        assert found.dx is buffers.dx
        assert found.dz is buffers.dz
        assert wide[:, :, 1].isnan().all()
        torch.testing.assert_close(found.out, out)
        torch.testing.assert_close((found.dx, found.dz, found.dB), (plain.dx, plain.dz, plain.dB))
