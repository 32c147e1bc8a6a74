"""Run upstream's own tests, from a checkout that the user has, on any device: `python -m tools.upstream_tests -h`."""
