"""Every kernel compiles, for every architecture from sm_70 on, with every NVRTC at hand, and none spills to local memory.

Needs no card: NVRTC makes cubins anywhere. The wheels nvidia-cuda-nvrtc-cu11, nvidia-cuda-nvrtc-cu12 and nvidia-cuda-nvrtc
(13) are in constraints/dev.txt; whichever are installed are used. Fast: the usual variants for one old and one new
architecture; --slow: every variant for every architecture.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import pytest

from anymamba.backends import cuda
from anymamba.backends.cuda.runtime import Runtime, Variant
from anymamba.backends.cuda.runtime.architectures import OLDEST
from anymamba.backends.cuda.runtime.cache import DiskCache
from anymamba.backends.cuda.runtime.libraries import nvrtc_candidates, open_nvrtc
from anymamba.backends.cuda.runtime.nvrtc import Nvrtc

# Bytes of a stack frame that are let pass. A register or two kept on the stack across the outer loop, as some ptxas versions
# do on some architectures, costs nothing that can be measured; an array or the inner loop's values would be hundreds.
FRAME_BOUND = 16
# Known to spill more: kernel -> bytes. To be emptied, not filled.
# ssd_forward: fp32 with a gate and odd strides (72), fp32 with 256 states on cards with little shared memory (56).
# ssd_backward: fp32, whose fragments are twice as wide.
# Norms: rows of more than 4096 columns with two branches and dropout (136), or a gate, a mean and a bias (72); a thread has 16
# columns there, with five to nine values of each, and a row's threads cannot be more. The usual: 16 at most, on sm_70 32.
KNOWN = {
    "layer_norm_backward": 136,
    "layernorm_gated_backward": 72,
    "selective_scan_backward": 128,
    "selective_scan_forward": 64,
    "ssd_backward": 168,
    "ssd_forward": 72,
}
# Before sm_80: shapes for large cards, which those cards do not get, with products that have no instruction there.
KNOWN_BEFORE_80 = {"ssd_backward": 256, "ssd_forward": 256}


def compilers() -> list[Nvrtc]:
    found: dict[tuple[int, int], Nvrtc] = {}
    for path in nvrtc_candidates():
        try:
            nvrtc = Nvrtc(open_nvrtc(path), str(path))
        except (OSError, AttributeError):
            continue
        found.setdefault(nvrtc.version, nvrtc)
    return list(found.values())


COMPILERS = compilers()
pytestmark = pytest.mark.skipif(not COMPILERS, reason="no NVRTC here: pip install nvidia-cuda-nvrtc-cu12")


def one_of_each_kernel() -> Iterator[Variant]:
    seen = set()
    for variant in cuda.variants():
        if variant.kernel not in seen:
            seen.add(variant.kernel)
            yield variant


def assert_compiles_without_spills(nvrtc: Nvrtc, variant: Variant, architecture: int) -> None:
    runtime = Runtime(nvrtc, None, DiskCache(None))
    image, log = runtime.compile(variant, architecture, "--ptxas-options=-v")
    assert image[:4] == b"\x7fELF", "no cubin"
    assert re.search(r"Used \d+ registers", log), f"no resource report: {log}"
    frames = {int(size) for size in re.findall(r"(\d+) bytes stack frame", log)} | frame_bytes(image)
    where = f"{variant.kernel} {dict(variant.defines)} sm_{architecture} NVRTC {nvrtc.version}"
    known = KNOWN | KNOWN_BEFORE_80 if architecture < 80 else KNOWN
    assert max(frames) <= known.get(variant.kernel, FRAME_BOUND), f"{where}: {max(frames)} bytes of local memory\n{log}"


def frame_bytes(cubin: bytes) -> set[int]:
    """Return the stack frame sizes (EIATTR_FRAME_SIZE) that a cubin's .nv.info sections give its functions."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    found = set()
    for name, _kind, _flags, _address, offset, length, *_ in headers:
        end = cubin.index(b"\0", names_at + name)
        if cubin[names_at + name : end] != b".nv.info":
            continue
        position = offset
        while position < offset + length:
            form, attribute, value = struct.unpack_from("<BBH", cubin, position)
            position += 4
            if form == 4:  # EIFMT_SVAL: `value` bytes follow
                if attribute == 0x11:
                    found.add(struct.unpack_from("<II", cubin, position)[1])
                position += value
    return found


@pytest.mark.parametrize("nvrtc", COMPILERS, ids=lambda nvrtc: "nvrtc" + ".".join(map(str, nvrtc.version)))
def test_one_variant_of_each_kernel_compiles_for_the_oldest_and_the_newest_card(nvrtc: Nvrtc) -> None:
    known = [architecture for architecture in nvrtc.architectures if architecture >= OLDEST]
    for variant in one_of_each_kernel():
        for architecture in {known[0], known[-1]}:
            assert_compiles_without_spills(nvrtc, variant, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("nvrtc", COMPILERS, ids=lambda nvrtc: "nvrtc" + ".".join(map(str, nvrtc.version)))
def test_the_usual_variants_compile_for_every_architecture(nvrtc: Nvrtc) -> None:
    for architecture in nvrtc.architectures:
        if architecture >= OLDEST:
            for variant in dict.fromkeys(cuda.variants()):
                assert_compiles_without_spills(nvrtc, variant, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("nvrtc", COMPILERS, ids=lambda nvrtc: "nvrtc" + ".".join(map(str, nvrtc.version)))
def test_every_variant_compiles(nvrtc: Nvrtc) -> None:
    for variant in dict.fromkeys(cuda.variants(every=True)):
        assert_compiles_without_spills(nvrtc, variant, 80)
