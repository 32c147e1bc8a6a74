"""CUDA kernels compiled at run time with what PyTorch already carries: no toolkit, no compiler, no Triton.

`load` a kernel by source file, name and definitions; `Kernel.launch` it. `libraries` finds NVRTC and the driver, `nvrtc` and
`driver` are typed ctypes over them, `architectures` picks the target, `cache` keeps images on disk, `sources` reads the
`.cu` files and their parameter structs, `kernel` puts these together.
"""

from __future__ import annotations

from anymamba.backends.cuda.runtime.kernel import Kernel, Plan, Runtime, Variant, cached, load, runtime, use_runtime

__all__ = ["Kernel", "Plan", "Runtime", "Variant", "cached", "load", "runtime", "use_runtime"]
