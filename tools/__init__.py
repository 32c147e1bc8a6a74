"""Development tools: run from the root of a checkout; no part of the installed product."""
