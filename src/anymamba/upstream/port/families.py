"""Which of our operator modules stand behind which of upstream's kernel modules: the whole mapping, as data.

Keys are module names below `mamba_ssm.ops`; values are modules below `anymamba.ops`, asked in this order for a name. A name
that none of them has in its `__all__` is served by upstream's own module (see `runtime`). Old names stay for old versions.
"""

from __future__ import annotations

__all__ = ["EXTENSIONS", "FAMILIES", "KERNEL_FOLDERS"]

KERNEL_FOLDERS = ("triton", "cute", "tilelang")
"""Folders below `mamba_ssm/ops` whose modules need a kernel compiler, and become redirects."""

_SSD = ("ssd_pieces", "ssd", "mamba_split_conv1d_scan")

FAMILIES: dict[str, tuple[str, ...]] = {
    "triton.layer_norm": ("layer_norm",),
    "triton.layernorm": ("layer_norm",),
    "triton.layernorm_gated": ("layernorm_gated",),
    "triton.k_activation": ("swiglu",),
    "triton.k_activations": ("swiglu",),
    "triton.selective_state_update": ("selective_state_update",),
    "triton.ssd_combined": ("ssd", "mamba_split_conv1d_scan", "ssd_pieces"),
    "triton.ssd_chunk_state": _SSD,
    "triton.ssd_chunk_scan": _SSD,
    "triton.ssd_state_passing": _SSD,
    "triton.ssd_bmm": _SSD,
}

EXTENSIONS = {
    "mamba_ssm": ("selective_scan_cuda",),
    "causal_conv1d": ("causal_conv1d_cuda",),
    "selective_scan": tuple(f"selective_scan_cuda_{kind}" for kind in ("core", "ndrows", "ndstate", "nrow", "oflex")),
    "anymamba_extensions": ("selective_scan_cuda",),
}
"""The compiled extension modules of each distribution: top-level modules over `anymamba.extensions`."""
