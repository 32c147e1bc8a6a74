"""Measurements; `gpu.py` is the command."""
