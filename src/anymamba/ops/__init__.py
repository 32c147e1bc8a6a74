"""The operators behind mamba_ssm and causal_conv1d, under upstream's names.

Each module is one operator family: what is computed, the argument checks, autograd and torch.compile. How it is computed
is a backend's matter (`anymamba.backends`).
"""

from __future__ import annotations

from anymamba.ops import _finite
from anymamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from anymamba.ops.layer_norm import RMSNorm, layer_norm_fn, layer_norm_linear_fn, rms_norm_fn
from anymamba.ops.layernorm_gated import layernorm_fn, rmsnorm_fn
from anymamba.ops.layout import announce as _announce
from anymamba.ops.layout import asked_for as _asked_for
from anymamba.ops.layout import explain_layout
from anymamba.ops.mamba_inner import mamba_inner_fn, mamba_inner_ref
from anymamba.ops.mamba_split_conv1d_scan import mamba_split_conv1d_scan_combined, mamba_split_conv1d_scan_ref
from anymamba.ops.selective_scan import selective_scan_fn, selective_scan_ref
from anymamba.ops.selective_state_update import selective_state_update, selective_state_update_ref
from anymamba.ops.ssd import mamba_chunk_scan, mamba_chunk_scan_combined
from anymamba.ops.ssd_pieces import ssd_chunk_scan_combined_ref, ssd_selective_scan
from anymamba.ops.swiglu import swiglu

__all__ = [
    "RMSNorm",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "explain_layout",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layernorm_fn",
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_inner_ref",
    "mamba_split_conv1d_scan_combined",
    "mamba_split_conv1d_scan_ref",
    "rms_norm_fn",
    "rmsnorm_fn",
    "selective_scan_fn",
    "selective_scan_ref",
    "selective_state_update",
    "selective_state_update_ref",
    "ssd_chunk_scan_combined_ref",
    "ssd_selective_scan",
    "swiglu",
]

if _finite.watched():
    _finite.watch(globals(), __all__)

if _asked_for():  # ANYMAMBA_EXPLAIN_LAYOUT=1: which path each call takes, on stderr
    import sys as _sys

    _announce(_sys.modules[__name__])
