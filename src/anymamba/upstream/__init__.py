"""Wing 2: bring upstream's own packages to this machine, and point them at `anymamba.ops`.

facts (`environment`, `pip_settings`, `releases`) -> `plan` -> action (`index` fetches, `archive` unpacks, `patches` repair,
`port` redirects, `wheel` packs, `transaction` installs) -> `proof` in a fresh process. Nothing here executes a line of what
was downloaded before the proof imports the installed package.
"""
