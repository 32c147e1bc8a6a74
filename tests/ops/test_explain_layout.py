"""explain_layout tells what a call's tensors look like, which path it took, what was copied, and what to change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import anymamba
from anymamba import backends
from anymamba.backends import use_backend
from anymamba.backends.cuda import _layout as cuda_layout
from anymamba.ops import causal_conv1d_fn, causal_conv1d_update, explain_layout, selective_scan_fn
from anymamba.ops.layout import TensorLayout


def scan_arguments(u: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch, dim, length = u.shape
    return u, u.clone(), -torch.rand(dim, 16), torch.randn(batch, 16, length), torch.randn(batch, 16, length)


def test_strides_alignment_and_the_chosen_backend_are_told() -> None:
    x = torch.randn(2, 64, 8).transpose(1, 2)
    layout = explain_layout(causal_conv1d_fn, x, torch.randn(8, 4))
    first = layout.tensors[0]
    assert (first.name, first.shape, first.strides, first.dense) == ("x", (2, 8, 64), (512, 1, 8), 1)
    assert first.past == x.data_ptr() % 16
    (path,) = layout.paths
    assert path.operator == "causal_conv1d"
    assert backends.unavailable(path.backend) is None
    assert "causal_conv1d_fn" in str(layout)


def test_a_slice_is_seen_by_its_address() -> None:
    x = torch.randn(2, 8, 65)[:, :, 1:]
    layout = explain_layout(causal_conv1d_fn, x, torch.randn(8, 4))
    assert layout.tensors[0].past == x.data_ptr() % 16 != 0
    assert "past a multiple of 16" in str(layout)


def test_copies_are_seen_within_operators_too() -> None:
    def copying(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous() + 1

    x = torch.randn(64, 32).t()
    (copy,) = explain_layout(copying, x).copies
    assert (copy.operation, copy.shape, copy.bytes) == ("contiguous", (32, 64), 32 * 64 * 4)
    assert explain_layout(copying, torch.randn(32, 64)).copies == ()
    with use_backend("torch"):  # its scan brings the steps to the front
        assert explain_layout(selective_scan_fn, *scan_arguments(torch.randn(2, 8, 64))).copies


def test_a_backend_that_was_asked_for_is_the_one_that_is_told() -> None:
    with use_backend("torch"):
        (path,) = explain_layout(selective_scan_fn, *scan_arguments(torch.randn(2, 8, 64))).paths
    assert path.backend == "torch"


def test_a_modules_forward_is_explained_operator_by_operator() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = causal_conv1d_fn(x, torch.ones(8, 4))
            return selective_scan_fn(*scan_arguments(y))

    layout = explain_layout(Block(), torch.randn(2, 8, 64))
    assert layout.function == "Block"
    assert [path.operator for path in layout.paths] == ["causal_conv1d", "selective_scan"]


@pytest.mark.skipif(backends.unavailable("cpu") is not None, reason="no CPU kernels here")
def test_the_cpus_scan_says_what_to_change() -> None:
    with use_backend("cpu"):
        u = torch.randn(2, 8, 128)[:, :, ::2]
        advice = explain_layout(selective_scan_fn, *scan_arguments(u)).advice
        assert advice
        assert advice[0].startswith("u: strides (1024, 128, 2)")
        assert explain_layout(selective_scan_fn, *scan_arguments(u.contiguous())).advice == ()


# The CUDA kernels' conditions, asked without a card: they look at shapes, strides and addresses only


def tensor(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str = "float16", past: int = 0
) -> TensorLayout:
    return TensorLayout(name, shape, strides, dtype, None, past)


@pytest.mark.parametrize(
    ("x", "words", "advice"),
    [
        (tensor("x", (2, 64, 256), (64 * 256, 256, 1)), "rows: 16 bytes at a time", ""),
        (tensor("x", (2, 64, 256), (64 * 256, 1, 64)), "channel last: a thread reads 4", ""),
        (
            tensor("x", (2, 63, 256), (63 * 256, 1, 63)),
            "channel last: a thread reads one",
            "dimension 1 (channels) has 63",
        ),
        (tensor("x", (2, 64, 250), (64 * 250, 250, 1)), "rows: their ends", "dimension 2 (time) has 250"),
        (tensor("x", (2, 64, 256), (64 * 256, 256, 1), past=2), "rows: their ends", "begins 2 bytes past"),
        (tensor("x", (2, 64, 256), (64 * 257, 257, 1)), "rows: their ends", "stride 257 along dimension 1"),
    ],
)
def test_the_convolutions_path_on_a_card(x: TensorLayout, words: str, advice: str) -> None:
    said, changes = cuda_layout.path("causal_conv1d", {"x": x})
    assert said.startswith(words)
    assert bool(changes) == bool(advice)
    assert advice in " ".join(changes)


def test_the_scans_path_on_a_card_names_the_tensor() -> None:
    good = tensor("u", (2, 64, 256), (64 * 256, 256, 1))
    bad = tensor("delta", (2, 64, 256), (64 * 256, 1, 64))
    assert cuda_layout.path("selective_scan", {"u": good, "delta": good}) == (
        "all inputs are read 16 bytes at a time",
        [],
    )
    said, changes = cuda_layout.path("selective_scan", {"u": good, "delta": bad})
    assert said == "delta read element by element"
    assert changes[0].startswith("delta: stride 64 along its last dimension (time)")


def test_the_state_updates_path_on_a_card() -> None:
    state = tensor("state", (2, 64, 16), (64 * 16, 16, 1), "float32")
    B = tensor("B", (2, 16), (16, 1), "float32")
    A = tensor("A", (64, 16), (16, 1), "float32")
    call = {"state": state, "A": A, "B": B, "C": B}
    assert cuda_layout.path("selective_state_update", call)[1] == []
    odd = tensor("state", (2, 64, 15), (64 * 15, 15, 1), "float32")
    said, changes = cuda_layout.path("selective_state_update", call | {"state": odd})
    assert "one by one" in said
    assert "state: 15 states; a multiple of 4" in changes[-1]


def test_the_dual_scans_path_on_a_card() -> None:
    x = tensor("x", (2, 16, 4, 64), (4096, 256, 64, 1))
    B = tensor("B", (2, 16, 1, 128), (2048, 128, 128, 1))
    assert cuda_layout.path("ssd", {"x": x, "B": B, "C": B}) == ("chunks are read 16 bytes at a time", [])
    odd = tensor("x", (2, 16, 4, 64), (4160, 260, 65, 1), past=2)
    said, changes = cuda_layout.path("ssd", {"x": odd, "B": B, "C": B})
    assert "element by element" in said
    assert any("no multiple of 8" in change for change in changes)
    assert any("begins 2 bytes past" in change for change in changes)


@pytest.mark.parametrize(
    ("operator", "x", "word"),
    [
        ("layer_norm", tensor("x", (4, 96), (96, 1), "float32"), ""),
        ("layer_norm", tensor("x", (4, 98), (98, 1), "float32"), "98 columns; a multiple of 4"),
        ("layernorm_gated", tensor("z", (4, 96), (1, 4), "float32"), "z: stride 4 along its last dimension"),
        ("swiglu", tensor("xy", (4, 12), (12, 1), "float16"), "6 columns"),
    ],
)
def test_the_norms_and_gates_paths_on_a_card(operator: str, x: TensorLayout, word: str) -> None:
    said, changes = cuda_layout.path(operator, {x.name: x})
    assert said == ("rows read column by column" if word else "rows are read 16 bytes at a time")
    assert any(word in change for change in changes) if word else changes == []


def test_the_variable_explains_each_kind_of_call_once_and_changes_no_result(tmp_path: Path) -> None:
    code = (
        "import torch; from anymamba.ops import causal_conv1d_fn, causal_conv1d_update, swiglu\n"
        "x = torch.randn(2, 8, 64); w = torch.randn(8, 4)\n"
        "a = causal_conv1d_fn(x, w); b = causal_conv1d_fn(x, w); causal_conv1d_fn(x[:, :, ::2], w)\n"
        "assert torch.equal(a, b)\n"
        "state = torch.zeros(2, 8, 4); causal_conv1d_update(torch.ones(2, 8), state, w)\n"
        "assert state[0, 0].tolist() == [0, 0, 0, 1]  # the step was made once\n"
    )
    environment = {
        **os.environ, "PYTHONPATH": str(Path(anymamba.__file__).parent.parent), "ANYMAMBA_EXPLAIN_LAYOUT": "1",
        "ANYMAMBA_BACKEND": "torch",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("anymamba: causal_conv1d_fn") == 2
    assert done.stderr.count("anymamba: causal_conv1d_update") == 1
    assert "strides (512, 64, 2)" in done.stderr


def test_a_step_keeps_what_it_is_given() -> None:
    state = torch.zeros(2, 8, 4)
    layout = explain_layout(causal_conv1d_update, torch.ones(2, 8), state.clone(), torch.randn(8, 4))
    assert [one.name for one in layout.tensors] == ["x", "conv_state", "weight"]
    assert not state.any()
