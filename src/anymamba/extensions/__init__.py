"""Upstream's compiled extension modules, as Python over `anymamba.ops`.

A port installs one-line modules of the extensions' names that re-export these. They keep what callers of the compiled ones
rely on: positional arguments, returned lists, tensors written in place, no autograd of their own.
"""
