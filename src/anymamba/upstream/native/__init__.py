"""Upstream's own C++ and CUDA sources, compiled here: the guide's way, every edit a rule that says why.

sources -> rules (patch) -> plan (toolchain, flags, jobs) -> objects (ninja) -> wheel -> the transaction of `anymamba.upstream`.
upstream's setup.py is never executed: its faults (wheel guessing, NameError, architecture list) cannot happen here. The rules
that repair it are for people who take the patched sources and build them themselves (`anymamba patch`).
"""
