"""A port of one of upstream's packages: made by `build`, and what it imports when it runs (everything else here).

Nothing is imported from this file: a port must not wait for what only an installation needs.
"""
