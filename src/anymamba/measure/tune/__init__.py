"""`anymamba tune`: measure kernel parameters on this machine and keep the best; `kernels` says which, `search` how."""
