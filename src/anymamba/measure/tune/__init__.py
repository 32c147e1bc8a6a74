"""`anymamba tune`: measure kernel parameters on this machine and keep the best; `works` says which, `search` how."""
