"""The runtime's logic without a card: loading, caching, packing, launching, refusing; over fakes of NVRTC and the driver."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from anymamba import backends
from anymamba.backends import cuda
from anymamba.backends import disk_cache as cache_module
from anymamba.backends.cuda.runtime import Variant, cached, libraries, load, sources, use_runtime
from anymamba.backends.cuda.runtime.architectures import target_option, why_unsupported
from anymamba.backends.cuda.runtime.cache import DiskCache, default_directory, key_of
from anymamba.backends.cuda.runtime.driver import Arguments
from anymamba.backends.cuda.runtime.kernel import Runtime
from anymamba.backends.cuda.runtime.nvrtc import Compiled, _with_source_lines
from anymamba.errors import KernelLaunchError, MachineError, OptionError

SCALE = """
#include "shared.cuh"
struct ScaleParameters {
    const X* __restrict__ x;   // a pointer; more
    X *out;
    long long x_stride[2], out_stride;  /* two
    lines */
    int count, flags;
    unsigned int mask;
    float by;
    int odd;
};
extern "C" __global__ void __launch_bounds__(256)
    scale(const __grid_constant__ ScaleParameters p) { }
"""


class FakeCompiler:
    version = (12, 4)
    architectures = (70, 80, 86, 90)
    path = "fake"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def compile(self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> Compiled:
        self.calls.append((name, tuple(options)))
        return Compiled(f"image {name} {' '.join(options)}".encode(), "")


class FakeDriver:
    device_type = "cuda"
    version = (12, 4)

    def __init__(self, capability: int = 86) -> None:
        self.capabilities = {0: capability, 1: 90}
        self.current = 0
        self.codes: list[int] = []
        self.launches: list[dict[str, Any]] = []
        self.loaded: list[tuple[bytes, int]] = []
        self.made_current: list[int] = []
        self.allowed: list[int] = []

    def capability(self, device: int) -> int:
        return self.capabilities[device]

    def multiprocessors(self, device: int) -> int:
        return 10

    def load(self, image: bytes, device: int) -> bytes:
        self.loaded.append((image, device))
        return image

    def function(self, module: bytes, name: str, device: int) -> tuple[str, int]:
        return (name, device)

    def allow_shared(self, function: Any, shared_bytes: int, device: int) -> None:
        self.allowed.append(shared_bytes)

    def launch(self, function: Any, *arguments: Any) -> int:
        *geometry, stream, _parameters, _ = arguments
        code = self.codes.pop(0) if self.codes else 0
        self.launches.append(
            {"function": function, "geometry": tuple(geometry), "stream": stream, "on": self.current, "code": code}
        )
        return code

    def bound_launch(self, function: Any, grid: Any, block: Any, shared_bytes: int, stream: int) -> Any:
        return lambda reference, extra: self.launch(function, *grid, *block, shared_bytes, stream, reference, extra)

    def current_stream(self, device: int) -> int:
        return 1000 + device

    def current_device(self) -> int:
        return self.current

    def make_current(self, device: int) -> None:
        self.made_current.append(device)

    def on_device(self, device: int) -> Any:
        driver = self

        class Guard:
            def __enter__(self) -> None:
                self.before, driver.current = driver.current, device

            def __exit__(self, *_: object) -> None:
                driver.current = self.before

        return Guard()

    def error(self, code: int) -> str:
        return f"CUDA_ERROR_FAKE ({code})"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernels' folder with scale.cu in it."""
    (tmp_path / "scale.cu").write_text(SCALE, encoding="utf-8")
    (tmp_path / "shared.cuh").write_text("// nothing\n", encoding="utf-8")
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    sources.read.cache_clear()
    sources.layout.cache_clear()
    yield tmp_path
    sources.read.cache_clear()
    sources.layout.cache_clear()


@pytest.fixture
def fake(kernels: Path, tmp_path: Path) -> Iterator[Runtime]:
    with use_runtime(Runtime(FakeCompiler(), FakeDriver(), DiskCache(tmp_path / "cache"))) as runtime:
        yield runtime


# --- sources and layouts


def test_the_layout_is_read_from_the_source(kernels: Path) -> None:
    layout = sources.layout("scale.cu", "scale")
    assert layout.fields == ("x", "out", "x_stride", "out_stride", "count", "flags", "mask", "by", "odd")
    assert layout.format == "@PP2qqiiIfi0P"
    assert layout.size == 64  # padded to 8 at the end, as a C++ compiler does
    assert layout.pointers == 2


@pytest.mark.parametrize("field", ["double x;", "long n;", "bool b;", "X x;", "int a[n];"])
def test_types_whose_size_differs_between_compilers_are_refused(kernels: Path, field: str) -> None:
    (kernels / "bad.cu").write_text(
        f"struct BadParameters {{ {field} }};\nvoid bad(const BadParameters p) {{", encoding="utf-8"
    )
    with pytest.raises(ValueError, match="cannot read the parameter"):
        sources.layout("bad.cu", "bad")


def test_every_kernel_in_the_package_has_a_readable_layout_and_begins_with_pointers() -> None:
    for variant in cuda.variants(every=True):
        layout = sources.layout(variant.file, variant.kernel)
        assert layout.pointers > 0, variant
        assert "P" not in layout.format[1 + layout.pointers : -2], f"{variant.kernel}: a pointer after other fields"


# --- loading


def test_a_kernel_is_compiled_once_and_then_comes_from_memory_or_disk(fake: Runtime, tmp_path: Path) -> None:
    first = load("scale.cu", "scale", {"X": "f32"}, device=0)
    assert load("scale.cu", "scale", {"X": "f32"}, device=0) is first
    assert len(fake.compiler.calls) == 1
    again = Runtime(FakeCompiler(), FakeDriver(), DiskCache(tmp_path / "cache"))
    again.load(Variant.of("scale.cu", "scale", X="f32"), 0)
    assert again.compiler.calls == []
    assert again.driver.loaded == fake.driver.loaded


def test_definitions_source_headers_options_and_version_all_make_another_entry(fake: Runtime, kernels: Path) -> None:
    variant = Variant.of("scale.cu", "scale", X="f32", FAST=True)
    assert dict(variant.defines) == {"X": "f32", "FAST": "1"}
    fake.image(variant, 86)
    fake.image(Variant.of("scale.cu", "scale", X="f16", FAST=True), 86)
    fake.image(variant, 90)
    newer = FakeCompiler()
    newer.version = (12, 5)
    Runtime(newer, FakeDriver(), fake.cache).image(variant, 86)
    (kernels / "shared.cuh").write_text("// something\n", encoding="utf-8")
    sources.read.cache_clear()
    Runtime(FakeCompiler(), FakeDriver(), fake.cache).image(variant, 86)
    assert fake.cache.directory is not None
    assert len(list(fake.cache.directory.glob("*.kernel"))) == 5


def test_each_device_loads_its_own_module(fake: Runtime) -> None:
    load("scale.cu", "scale", device=0)
    load("scale.cu", "scale", device=1)
    assert [device for _, device in fake.driver.loaded] == [0, 1]
    assert b"sm_86" in fake.driver.loaded[0][0]
    assert b"sm_90" in fake.driver.loaded[1][0]


def test_threads_that_want_one_kernel_compile_it_once(fake: Runtime) -> None:
    gate, compile_ = threading.Barrier(8), fake.compiler.compile

    def slow(*arguments: Any) -> Compiled:
        threading.Event().wait(0.05)
        result: Compiled = compile_(*arguments)
        return result

    fake.compiler.compile = slow

    def run() -> None:
        gate.wait()
        load("scale.cu", "scale")

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.compiler.calls) == 1


def test_what_a_family_remembers_is_forgotten_with_the_runtime(fake: Runtime) -> None:
    @cached
    def kernel_of(device: int) -> Any:
        return load("scale.cu", "scale", device=device)

    first = kernel_of(0)
    assert kernel_of(0) is first
    with use_runtime(Runtime(FakeCompiler(), FakeDriver(), DiskCache(None))):
        assert kernel_of(0) is not first


# --- launching


def test_a_launch_passes_geometry_stream_and_the_packed_struct(fake: Runtime) -> None:
    kernel = load("scale.cu", "scale")
    packed = kernel.pack(1, 2, 3, 4, 5, 6, 7, 8, 0.5, 9)
    assert struct.unpack(sources.layout("scale.cu", "scale").format, packed) == (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 9)
    kernel.launch((4, 2, 1), (64, 1, 1), 128, packed)
    kernel.launch((4, 2, 1), (64, 1, 1), 128, packed, stream=7)
    assert [(launch["geometry"], launch["stream"]) for launch in fake.driver.launches] == [
        ((4, 2, 1, 64, 1, 1, 128), 1000),
        ((4, 2, 1, 64, 1, 1, 128), 7),
    ]


def test_a_plan_packs_the_pointers_in_front_of_what_was_settled(fake: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = load("scale.cu", "scale")
    plan = kernel.plan((4, 1, 1), (64, 1, 1), 0, 3, 4, 5, 6, 7, 8, 0.5, 9)
    plan(11, 12)
    plan(21, 22)
    buffer, _ = plan._slots[threading.get_ident()]
    assert bytes(buffer) == kernel.pack(21, 22, 3, 4, 5, 6, 7, 8, 0.5, 9)
    assert [launch["geometry"] for launch in fake.driver.launches] == [(4, 1, 1, 64, 1, 1, 0)] * 2


def test_threads_do_not_share_the_buffer_of_a_plan(fake: Runtime) -> None:
    plan = load("scale.cu", "scale").plan((1, 1, 1), (32, 1, 1), 0, *[0] * 8)
    gate = threading.Barrier(4)

    def run(value: int) -> None:
        gate.wait()
        plan(value, value)
        gate.wait()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    firsts = {struct.unpack_from("@P", bytes(buffer))[0] for buffer, _ in plan._slots.values()}
    assert firsts == {1, 2, 3, 4}


def test_another_current_device_is_switched_for_the_launch(fake: Runtime) -> None:
    kernel = load("scale.cu", "scale", device=1)
    kernel.launch((1, 1, 1), (32, 1, 1), 0, b"")
    kernel.plan((1, 1, 1), (32, 1, 1), 0, *[0] * 8)(0, 0)
    assert [(launch["on"], launch["stream"]) for launch in fake.driver.launches] == [(1, 1001)] * 2
    assert fake.driver.current == 0


def test_a_thread_without_a_context_gets_one(fake: Runtime) -> None:
    fake.driver.codes = [201]
    load("scale.cu", "scale").launch((1, 1, 1), (32, 1, 1), 0, b"")
    assert fake.driver.made_current == [0]
    assert [launch["code"] for launch in fake.driver.launches] == [201, 0]


def test_an_empty_grid_is_no_error(fake: Runtime) -> None:
    fake.driver.codes = [1]
    load("scale.cu", "scale").launch((0, 1, 1), (32, 1, 1), 0, b"")


def test_a_failed_launch_says_what_and_where(fake: Runtime) -> None:
    fake.driver.codes = [700, 700]
    with pytest.raises(KernelLaunchError) as caught:
        load("scale.cu", "scale").plan((3, 1, 1), (32, 1, 1), 0, *[0] * 8)(0, 0)
    assert "Kernel scale could not be launched: CUDA_ERROR_FAKE (700)" in str(caught.value)
    assert "grid (3, 1, 1)" in caught.value.why


def test_more_shared_memory_than_48_kb_is_asked_for_once(fake: Runtime) -> None:
    kernel = load("scale.cu", "scale")
    for size in (1024, 60_000, 60_000, 50_000):
        kernel.launch((1, 1, 1), (32, 1, 1), size, b"")
    assert fake.driver.allowed == [60_000]


def test_arguments_hold_the_bytes_alive() -> None:
    array = Arguments(b"abc" + bytes([1]))
    assert array[0] == b"abc\x01"


# --- architectures


@pytest.mark.parametrize(
    ("capability", "known", "option"),
    [
        (86, (70, 80, 86, 90), "--gpu-architecture=sm_86"),
        (89, (70, 80, 86), "--gpu-architecture=compute_86"),
        (120, (70, 90), "--gpu-architecture=compute_90"),
    ],
)
def test_the_card_gets_its_own_code_or_the_newest_ptx(capability: int, known: tuple[int, ...], option: str) -> None:
    assert target_option(capability, known) == option
    assert why_unsupported(capability, known) is None


def test_cards_that_cannot_be_served_are_told_why() -> None:
    assert why_unsupported(61, (50, 61, 70)) == "the card has compute capability 6.1; the kernels need 7.0 or newer"
    assert why_unsupported(70, (75, 80)) == "this NVRTC dropped compute capability 7.0 (its oldest is 7.5)"


# --- the disk cache


def test_the_cache_gives_back_what_it_got(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "a" / "b")
    assert cache.get("k") is None
    assert cache.put("k", b"image")
    assert cache.get("k") == b"image"


@pytest.mark.parametrize("damage", [b"", b"anymamba kernel 1\n", b"x" * 100])
def test_a_damaged_entry_is_removed_and_missed(tmp_path: Path, damage: bytes) -> None:
    cache = DiskCache(tmp_path)
    cache.put("k", b"image")
    path = tmp_path / "k.kernel"
    path.write_bytes(damage)
    assert cache.get("k") is None
    assert not path.exists()
    cache.put("k", b"image")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert cache.get("k") is None


def test_the_entries_used_longest_ago_go_when_the_folder_is_full(tmp_path: Path) -> None:
    import os

    cache = DiskCache(tmp_path, bound=3000)
    for age, key in enumerate("abc"):
        cache.put(key, bytes(900))
        os.utime(tmp_path / f"{key}.kernel", (1000 + age, 1000 + age))
    assert cache.get("a") is not None  # used now
    cache.put("d", bytes(900))
    assert sorted(path.stem for path in tmp_path.glob("*.kernel")) == ["a", "c", "d"]


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_compile(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    cache = DiskCache(blocked / "cache")
    assert not cache.put("k", b"image")
    assert cache.get("k") is None
    assert not DiskCache(None).put("k", b"image")


def test_a_sharing_error_is_retried_and_then_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module.time, "sleep", lambda seconds: None)
    failures = [PermissionError(13, "in use")] * 2
    replace = Path.replace

    def sometimes(self: Path, target: Path) -> Path:
        if failures:
            raise failures.pop()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", sometimes)
    cache = DiskCache(tmp_path)
    assert cache.put("k", b"image")
    failures += [PermissionError(13, "in use")] * 10
    assert not cache.put("other", b"image")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.kernel"]  # no temporary file is left


def test_the_cache_is_in_the_folder_of_all_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYMAMBA_CACHE_DIR", str(tmp_path))
    assert default_directory() == tmp_path / "cuda"


def test_keys_are_unambiguous() -> None:
    assert key_of(["ab", "c"]) != key_of(["a", "bc"])
    assert key_of(["ab", "c"]) == key_of(["ab", "c"])


# --- libraries


@pytest.mark.parametrize(
    ("name", "major"),
    [
        ("libnvrtc.so.12", 12),
        ("libnvrtc.so.11.2", 11),
        ("libnvrtc-672ee683.so.11.2", 11),
        ("libnvrtc.so.13.0.48", 13),
        ("nvrtc64_112_0.dll", 11),
        ("nvrtc64_120_0.dll", 12),
        ("nvrtc64_130_0.dll", 13),
        ("libnvrtc-builtins.so.12.4", None),
        ("nvrtc-builtins64_118.dll", None),
        ("libnvrtc.alt.so.12", None),
        ("nvrtc64_120_0.alt.dll", None),
        ("libnvrtc_static.a", None),
    ],
)
def test_nvrtc_is_known_by_its_file_name(name: str, major: int | None) -> None:
    assert libraries.nvrtc_major(name) == major


def test_pytorchs_own_cuda_version_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libnvrtc.so.11.2", "libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc-builtins.so.12.4"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(libraries, "_folders", lambda: iter([tmp_path, tmp_path / "absent"]))
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    assert libraries.nvrtc_candidates()[0].name == "libnvrtc.so.12"
    monkeypatch.setenv("ANYMAMBA_NVRTC", "/my/libnvrtc.so")
    assert libraries.nvrtc_candidates() == [Path("/my/libnvrtc.so")]


# --- messages and availability


def test_a_compile_log_shows_the_source_lines() -> None:
    log = 'a.cu(2): error: identifier "f99" is undefined\n\n1 error detected'
    assert _with_source_lines(log, {"a.cu": "int x;\n  f99 y;\n"}).splitlines()[1] == "    f99 y;"
    quoted = 'a.cu(2): error: identifier "f99" is undefined\n    f99 y;\n    ^'
    assert _with_source_lines(quoted, {"a.cu": "int x;\n  f99 y;\n"}) == quoted


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_without_cuda_the_backend_says_so_and_stays_out_of_the_way() -> None:
    assert "built without CUDA" in str(cuda.unavailable())
    assert "cuda" in backends.names()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_warmup_without_a_card_says_why() -> None:
    with pytest.raises(MachineError, match="nothing to warm up"):
        cuda.warmup()


def test_warmup_loads_every_kernel_of_a_family_once(tmp_path: Path) -> None:
    with use_runtime(Runtime(FakeCompiler(), FakeDriver(), DiskCache(tmp_path))) as runtime:
        seen: list[int] = []
        count, _ = cuda.warmup(["causal_conv1d"], device=0, progress=lambda done, total, variant: seen.append(done))
        assert count == len(runtime.driver.loaded) == len(seen) == len(set(cuda.variants(["causal_conv1d"])))
        with pytest.raises(OptionError, match="no kernels of sorting"):
            cuda.warmup(["sorting"])
