"""What real Microsoft and NVIDIA compilers say of upstream's sources: `python -m tools.windows_lab compile --msvc DIR`.

The commands are the product's own: a Windows Python of the laboratory plans a native build as `anymamba build` does, and each
compile step of that plan is run with real `cl.exe` and `nvcc.exe` under wine. Each rule is then left out in turn, and the
same file must fail with the very error that the rule names.

- `trees`   a Microsoft tree that the user names (never fetched by us; Microsoft's licence is the user's to accept), and
            CUDA trees made of NVIDIA's wheels for Windows
- `wanted`  which releases, with which torch and which CUDA headers, and where each rule is tried
- `planner` runs in the Windows Python: the product's plan, sources, edits and command lines, as JSON
- `units`   one compile step, or a link, under wine; the first error of what was said
- `record`  the result file, which a later call goes on with
- `command` all of it, in the order: cheap and telling first
"""
