"""Write a Windows DLL that has no code: each name it exports is another DLL's.

Wine 8 has no `bcryptprimitives.dll`. Everything built by a Rust of 2024 or later wants its one function, `ProcessPrng`
(libcst and pydantic-core here), and fails with "DLL load failed ... Module not found". The same service under an older
name is `SystemFunction036` of advapi32: same arguments, same answer. Windows calls such an export a forwarder.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_SECTION = 0x1000  # where the one section begins in memory
_FILE = 0x200  # and in the file


def dll(name: str, forwards: Mapping[str, str]) -> bytes:
    """The bytes of a 64-bit DLL `name` whose exports lead elsewhere.

    Parameters
    ----------
    forwards
        Exported name -> `library.function`, such as `{"ProcessPrng": "advapi32.SystemFunction036"}`.
    """
    exports = _exports(name, dict(sorted(forwards.items())))
    if len(exports) > 0x1000:
        raise ValueError(f"{len(forwards)} exports do not fit into one page")
    raw = exports.ljust(-(-len(exports) // _FILE) * _FILE, b"\0")
    coff = struct.pack("<HHIIIHH", 0x8664, 1, 0, 0, 0, 240, 0x2022)  # x86-64, one section, a large-address DLL
    optional = struct.pack("<HBBIIIII", 0x20B, 14, 0, 0, len(raw), 0, 0, _SECTION)  # PE32+, no entry point
    optional += struct.pack("<QII", 0x180000000, 0x1000, _FILE)
    optional += struct.pack("<HHHHHHI", 6, 0, 0, 0, 6, 0, 0)  # for Windows 6.0 and later
    optional += struct.pack("<IIIHH", 2 * _SECTION, _FILE, 0, 2, 0x160)
    optional += struct.pack("<QQQQII", 0x100000, 0x1000, 0x100000, 0x1000, 0, 16)
    optional += struct.pack("<II", _SECTION, len(exports)) + bytes(15 * 8)  # the export directory, and no other
    section = struct.pack("<8sIIIIIIHHI", b".rdata", len(exports), _SECTION, len(raw), _FILE, 0, 0, 0, 0, 0x40000040)
    head = b"MZ".ljust(0x3C, b"\0") + struct.pack("<I", 0x40) + b"PE\0\0" + coff + optional + section
    return head.ljust(_FILE, b"\0") + raw


def _exports(name: str, forwards: Mapping[str, str]) -> bytes:
    count = len(forwards)
    functions = _SECTION + 40
    names = functions + 4 * count
    ordinals = names + 4 * count
    strings, at = b"", ordinals + 2 * count

    def place(text: str) -> int:
        nonlocal strings
        rva = at + len(strings)
        strings += text.encode("ascii") + b"\0"
        return rva

    own_name = place(name)
    name_rvas = [place(exported) for exported in forwards]
    # An address inside the export directory is a forwarder's text, not code.
    forward_rvas = [place(target) for target in forwards.values()]
    head = struct.pack("<IIHHIIIIIII", 0, 0, 0, 0, own_name, 1, count, count, functions, names, ordinals)
    tables = struct.pack(f"<{count}I{count}I{count}H", *forward_rvas, *name_rvas, *range(count))
    return head + tables + strings
