"""The measured rows, one module a family of operators."""
