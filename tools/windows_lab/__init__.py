"""A Windows laboratory on a Linux machine: two real Windows Pythons, with torch, run under wine.

The product is for Windows first, and a claim about Windows needs a run there. `setup` builds the laboratory in a cache
folder outside the repository, `test` runs the whole test-suite inside it, `shell` opens it, `clean` removes it.
`docs/windows.md` describes its use, its limits and every trap that the modules here step around:

- `layout`       where everything lies, in a folder named by the user
- `interpreters` which Windows Pythons, as data
- `runner`       start a process, read its pipe, end its whole tree
- `wine`         find or install wine, the environment its processes get, path translation
- `fetch`        Windows wheels and Pythons, downloaded by this machine's pip
- `prepare`      the steps of `setup`, each done once for the inputs it depends on
- `turns`        many may use it at once, but only one change it
- `product`      this checkout's product in a Windows Python
- `checkout`     dev.py there, on a copy of this checkout
- `suite`        the test-suite in a Windows Python
- `forwarder`    a DLL without code, for one that wine lacks
- `compile`      real compilers for Windows on upstream's sources
- `lock`         the lock files, written anew
- `junit`        counts out of result files, and the table that puts them side by side
"""
