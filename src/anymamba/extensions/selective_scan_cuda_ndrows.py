"""`selective_scan_cuda_ndrows`: another name under which `selective_scan_cuda_nrow` is asked for."""

from __future__ import annotations

from anymamba.extensions.selective_scan_cuda_core import bwd, fwd

__all__ = ["bwd", "fwd"]
