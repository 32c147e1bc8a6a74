"""`selective_scan_cuda_nrow`: VMamba's scan whose compiled kernel takes `nrows` channels a block; the results are core's."""

from __future__ import annotations

from anymamba.extensions.selective_scan_cuda_core import bwd, fwd

__all__ = ["bwd", "fwd"]
