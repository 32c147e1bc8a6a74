"""What only a card can show of the runtime: graphs, streams, threads, leaks, large tensors."""

from __future__ import annotations

import threading

import pytest
import torch

from anymamba.backends import use_backend
from anymamba.ops import causal_conv1d_fn, causal_conv1d_update

pytestmark = pytest.mark.gpu


def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with use_backend("cuda"):
        out: torch.Tensor = causal_conv1d_fn(x, weight, activation="silu")
    return out


def test_a_captured_graph_replays_what_eager_gives() -> None:
    x, weight = torch.randn(2, 64, 300, device="cuda"), torch.randn(64, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    convolve(x, weight)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = convolve(x, weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, convolve(x, weight))


def test_a_kernel_that_was_never_used_can_be_captured() -> None:
    x, weight = torch.randn(2, 64, 30, device="cuda").half(), torch.randn(64, 2, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = convolve(x, weight)
    graph.replay()
    assert torch.equal(out, convolve(x, weight))


def test_launches_follow_the_current_stream() -> None:
    x, weight = torch.randn(4, 256, 4096, device="cuda"), torch.randn(256, 4, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.add_(1)
        out = convolve(x, weight)
    stream.synchronize()
    assert torch.equal(out, convolve(x, weight))


def test_a_thread_that_never_used_cuda_can_launch() -> None:
    x, weight = torch.randn(1, 8, 50, device="cuda"), torch.randn(8, 4, device="cuda")
    wanted = convolve(x, weight)
    seen: list[torch.Tensor | BaseException] = []

    def run() -> None:
        try:
            seen.append(convolve(x, weight))
        except BaseException as error:
            seen.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert all(isinstance(result, torch.Tensor) and torch.equal(result, wanted) for result in seen), seen


def test_backward_is_bit_equal_in_every_run() -> None:
    x = torch.randn(4, 96, 5000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(96, 4, device="cuda", requires_grad=True)
    gradients = [torch.autograd.grad(convolve(x, weight).float().square().sum(), (x, weight)) for _ in range(3)]
    for gradient in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradient, gradients[0]))


def test_a_hundred_thousand_launches_leak_nothing() -> None:
    x, state = torch.randn(1, 64, device="cuda"), torch.zeros(1, 64, 4, device="cuda")
    weight = torch.randn(64, 4, device="cuda")
    with use_backend("cuda"):
        for _ in range(1000):
            causal_conv1d_update(x, state, weight)
        torch.cuda.synchronize()
        allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        for _ in range(100_000):
            causal_conv1d_update(x, state, weight)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.mem_get_info()[0] >= free - 2**20  # of the whole card: let nothing else run on it


def test_more_than_two_to_the_31_elements() -> None:
    batch, dim, seqlen = 3, 1024, 2**20  # 3.2e9 elements, 6.4 GB
    x = torch.empty(batch, dim, seqlen, device="cuda", dtype=torch.bfloat16).normal_()
    weight = torch.randn(dim, 4, device="cuda")
    out = convolve(x, weight)
    assert torch.equal(out[-1, -3:, -5000:], convolve(x[-1:, -3:, -5003:], weight[-3:])[0, :, 3:])
    channels = x.view(batch, seqlen, dim).transpose(1, 2)
    out = convolve(channels, weight)
    assert torch.equal(out[-1, -4:, -5000:], convolve(channels[-1:, -4:, -5003:], weight[-4:])[0, :, 3:])
