"""Placeholder until the demo and test commands are written."""
