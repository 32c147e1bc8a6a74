"""A package index on this machine that behaves, or misbehaves on demand."""

from __future__ import annotations

import hashlib
import threading
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
    cut_downloads: int = 0  # break off so many downloads half-way
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def page(self, name: str) -> str | None:
        links = []
        for file, path in self.files.items():
            if file.rpartition("-")[0].replace("_", "-") == name:
                digest = "0" * 64 if self.wrong_hash else hashlib.sha256(path.read_bytes()).hexdigest()
                links.append(f'<a href="../../files/{file}{f"#sha256={digest}" if self.hashes else ""}">{file}</a>')
        return "<html><body>" + "".join(links) + "</body></html>" if links else None


@contextmanager
def serve_index(server: IndexServer) -> Iterator[IndexServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.requests.append(f"{self.path} {self.headers.get('Range', '')}".strip())
            parts = self.path.strip("/").split("/")
            if parts[0] == "simple":
                if server.fail_pages:
                    server.fail_pages -= 1
                    return self.answer(500, b"")
                page = server.page(parts[1])
                return self.answer(404, b"") if page is None else self.answer(200, page.encode(), "text/html")
            path = server.files.get(parts[-1])
            if path is None:
                return self.answer(404, b"")
            content, start = path.read_bytes(), 0
            if (wanted := self.headers.get("Range", "")).startswith("bytes="):
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if server.cut_downloads:
                server.cut_downloads -= 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
                return None
            return self.answer(206 if start else 200, content[start:], "application/gzip")

        def answer(self, status: int, content: bytes, kind: str = "text/plain") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
