"""Fresh memory is an ordinary tensor, whatever the system makes of the advice."""

from __future__ import annotations

import pytest
import torch

from anymamba.machine import memory


@pytest.mark.parametrize("size", [0, 1, 1 << 18, (1 << 20) + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_is_as_torch_would_make_it_and_holds_what_is_written(size: int, dtype: torch.dtype) -> None:
    like = torch.arange(2 * size).view(2, size).t()
    wanted = torch.empty_like(like, dtype=dtype)
    for fresh in (memory.empty_like(like, dtype), memory.empty(torch.empty(0), size, 2, dtype=dtype)):
        assert fresh.dtype == dtype
        assert fresh.shape == wanted.shape
        assert torch.equal(fresh.copy_(like), like.to(dtype))
    assert memory.empty_like(like, dtype).stride() == wanted.stride()


def test_a_system_without_advice_gives_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "win32")
    memory._advise.cache_clear()
    try:
        assert memory._advise() is None
        assert memory.empty(torch.empty(0), 1 << 21).fill_(1).sum() == 1 << 21
    finally:
        memory._advise.cache_clear()


def test_only_large_tensors_on_the_cpu_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "_advise", lambda: lambda start, size, _advice: calls.append((start, size)))
    memory.empty(torch.empty(0), 16)
    memory.empty_like(torch.empty(1 << 22, device="meta"))
    assert not calls
    large = memory.empty(torch.empty(0), 1 << 21)
    ((start, size),) = calls
    assert start % 4096 == 0 and size % 4096 == 0
    assert large.data_ptr() <= start and start + size <= large.data_ptr() + large.numel() * 4
    assert size > large.numel() * 4 - 2 * 4096
