"""Measuring what the operators do on this machine: are they right (`verify`), how fast are they (`bench`)."""
