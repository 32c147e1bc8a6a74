"""A package index on this machine that behaves, or misbehaves on demand."""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class IndexServer:
    """What the server serves, how it errs, and what it was asked."""

    files: dict[str, Path] = field(default_factory=dict)
    hashes: bool = True
    wrong_hash: bool = False
    fail_pages: int = 0  # answer so many page requests with 500
    fail_with: int = 500
    cut_downloads: int = 0  # break off so many downloads half-way
    cut_length: bool = True  # and say before how long they are
    wrong_length: int = 0  # say so many bytes more than there are (or fewer)
    delay: float = 0.0  # seconds before every answer
    redirects: str = ""  # "pages" or "files": answer with a redirect to the same address
    missing_files: bool = False
    fail_files: int = 0  # answer so many downloads with 500
    yanked: tuple[str, ...] = ()  # versions
    prefix: str = ""  # path before simple/ and files/, as mirrors have it
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def page(self, name: str) -> str | None:
        links = []
        for file, path in self.files.items():
            if file.rpartition("-")[0].replace("_", "-") == name:
                digest = "0" * 64 if self.wrong_hash else hashlib.sha256(path.read_bytes()).hexdigest()
                yank = ' data-yanked="broken"' if file.removesuffix(".tar.gz").rpartition("-")[2] in self.yanked else ""
                target = f"../../files/{file}{f'#sha256={digest}' if self.hashes else ''}"
                links.append(f'<a href="{target}"{yank}>{file}</a>')
        return "<html><body>" + "".join(links) + "</body></html>" if links else None


@contextmanager
def serve_index(server: IndexServer, tls: ssl.SSLContext | None = None) -> Iterator[IndexServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.requests.append(f"{self.path} {self.headers.get('Range', '')}".strip())
            time.sleep(server.delay)
            parts = self.path.strip("/").removeprefix(server.prefix).strip("/").split("/")
            if server.redirects == ("pages" if parts[0] == "simple" else "files"):
                self.send_response(302)
                self.send_header("Location", self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
            if parts[0] == "simple":
                if server.fail_pages:
                    server.fail_pages -= 1
                    return self.answer(server.fail_with, b"")
                page = server.page(parts[1])
                return self.answer(404, b"") if page is None else self.answer(200, page.encode(), "text/html")
            path = server.files.get(parts[-1])
            if path is None or server.missing_files:
                return self.answer(404, b"")
            if server.fail_files:
                server.fail_files -= 1
                return self.answer(500, b"")
            content, start = path.read_bytes(), 0
            if (wanted := self.headers.get("Range", "")).startswith("bytes="):
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if server.cut_downloads:
                server.cut_downloads -= 1
                self.send_response(200)
                if server.cut_length:
                    self.send_header("Content-Length", str(len(content)))
                else:
                    self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
                return None
            if server.wrong_length:
                self.close_connection = True
            return self.answer(206 if start else 200, content[start:], "application/gzip", server.wrong_length)

        def answer(self, status: int, content: bytes, kind: str = "text/plain", more: int = 0) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content) + more))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # who waited too long is gone
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        if tls is not None:
            http.socket = tls.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
            http.handle_error = lambda *_: None  # type: ignore[method-assign]  # refused handshakes are the test
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        server.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{http.server_address[1]}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
