"""anymamba: mamba_ssm and causal_conv1d on any machine.

Two wings and one door. `anymamba.ops` computes (the operators behind upstream's packages, each served by the first
backend that can); `anymamba.upstream` brings upstream's own packages to this machine and points them at the operators.
Importing this package imports neither torch nor anything heavy.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
