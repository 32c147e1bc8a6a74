"""One module a command; see `anymamba.cli`."""
