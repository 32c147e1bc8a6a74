"""Compiled modules are tried in a process of their own; a project's sources tell what it wants; the network answers or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from anymamba.machine._programs import Answer
from anymamba.machine.extensions import glibc_wanted, read_extensions
from anymamba.machine.project import read_project
from anymamba.machine.reach import Route, read_reach

# Extensions


def elf(path: Path, *symbols: bytes) -> Path:
    path.write_bytes(b"\x7fELF" + b"\0".join((b"", *symbols, b"")))
    return path


def test_our_own_modules_in_python_need_no_trial() -> None:
    def forbidden(name: str) -> Answer:
        raise AssertionError(name)

    assert read_extensions(locate=lambda name: None if name == "triton" else f"/x/{name}.py", load=forbidden) == ()


def test_a_module_that_does_not_load_is_quoted_with_its_own_error(tmp_path: Path) -> None:
    file = elf(tmp_path / "selective_scan_cuda.so", b"GLIBC_2.17", b"GLIBC_2.4", b"GLIBC_2.32", b"GLIBCXX_3.4.29")
    said = "Traceback\n  File x\nImportError: x.so: undefined symbol: _ZN3c10\n"
    (found,) = read_extensions(
        locate=lambda name: str(file) if name == "selective_scan_cuda" else None, load=lambda name: Answer(1, "", said)
    )
    assert (found.loads, found.problem) == (False, "ImportError: x.so: undefined symbol: _ZN3c10")
    assert found.glibc == (2, 32)


def test_a_module_that_kills_its_process_is_an_answer_too(tmp_path: Path) -> None:
    file = elf(tmp_path / "causal_conv1d_cuda.so")
    found = read_extensions(
        locate=lambda name: str(file) if name == "causal_conv1d_cuda" else None, load=lambda name: Answer(-11, "", "")
    )
    assert found[0].problem == "the process ended with -11"
    assert found[0].glibc is None


@pytest.mark.parametrize("content", [b"", b"MZ\x90", b"\x7fELF"])
def test_files_of_other_systems_name_no_glibc(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.pyd"
    file.write_bytes(content)
    assert glibc_wanted(file) is None
    assert glibc_wanted(tmp_path / "absent") is None


# Projects


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_folder_without_python_is_no_project(tmp_path: Path) -> None:
    assert read_project(tmp_path) is None
    assert read_project(tmp_path / "gone") is None


def test_a_fork_beside_its_users_is_found_and_who_would_be_imported(tmp_path: Path) -> None:
    write(
        tmp_path,
        vim__models="from mamba_ssm.modules.mamba_simple import Mamba\nMamba(bimamba_type='v2')\n",
        fork__mamba_ssm__ops__selective_scan_interface="import selective_scan_cuda\n",
        fork__mamba_ssm__modules__mamba_simple="def __init__(self, bimamba_type=None): ...\n",
    )
    (tmp_path / "fork" / "mamba_ssm" / "__init__.py").write_text("", encoding="utf-8")
    project = read_project(tmp_path, locate=lambda name: None)
    assert project is not None
    assert project.fork == (("bimamba_type", "vim/models.py"),)
    assert project.vendored == ("fork/mamba_ssm",)
    assert (project.imported, project.missing) == ("", ("selective_scan_cuda",))
    # installed with pip -e, or first on the path
    installed = str(tmp_path / "fork" / "mamba_ssm" / "__init__.py")
    project = read_project(tmp_path, locate=lambda name: installed if name == "mamba_ssm" else None)
    assert project is not None
    assert project.imported_is_fork
    # started from the fork's own folder, that one wins whatever is installed
    project = read_project(tmp_path / "fork", locate=lambda name: None)
    assert project is not None
    assert project.imported_is_fork


def test_vmambas_modules_are_found_by_import_and_by_call(tmp_path: Path) -> None:
    write(
        tmp_path,
        csms6s="try:\n    import selective_scan_cuda_core\nexcept ImportError:\n    pass\n",
        vmamba="out, x = selective_scan_cuda_oflex.fwd(u)\n# selective_scan_cuda_ndrows is not used\n",
    )
    project = read_project(tmp_path, locate=lambda name: "x" if name.endswith("core") else None)
    assert project is not None
    assert dict(project.imports) == {"selective_scan_cuda_core": "csms6s.py", "selective_scan_cuda_oflex": "vmamba.py"}
    assert project.missing == ("selective_scan_cuda_oflex",)


def test_upstreams_own_users_are_no_forks(tmp_path: Path) -> None:
    write(tmp_path, train="from mamba_ssm import Mamba\nfrom mamba_ssm.ops.triton.layer_norm import RMSNorm\n")
    project = read_project(tmp_path, locate=lambda name: None)
    assert project is not None
    assert (project.fork, project.imports) == ((), ())


def test_a_checkout_of_this_product_expects_no_fork() -> None:
    project = read_project(Path(__file__).parents[2], locate=lambda name: None)
    assert project is not None
    assert project.fork == ()


# The network


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("Authorization") == "Basic bGk6c2VjcmV0"  # li:secret
            self.send_response(200 if allowed or self.path == "/open" else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


def test_the_index_is_asked_with_its_password_which_is_not_shown(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    index, github = read_reach(
        route=lambda: Route(f"http://li:secret@{server}/simple/"), github=f"http://{server}/open"
    )
    assert (index.what, index.problem, index.address) == ("index", "", f"http://{server}/simple/mamba-ssm/")
    assert github.problem == ""


def test_what_does_not_answer_is_told_with_its_reason(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    index, github = read_reach(route=lambda: Route(f"http://{server}/simple"), github="http://127.0.0.1:9/")
    assert index.problem.startswith("answers 401")
    assert "Error" in github.problem
