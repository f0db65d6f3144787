"""A site on this machine: browsers offer WebGPU to pages from localhost, and not to pages from files."""

from __future__ import annotations

import functools
import http.server
from pathlib import Path
from typing import Any


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # What a system has noted for an ending may be wrong (Windows' registry), and a module of another type is not run.
    extensions_map = {  # noqa: RUF012
        ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".json": "application/json",
        ".bin": "application/octet-stream", ".gz": "application/octet-stream", "": "application/octet-stream",
    }  # fmt: skip

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")  # the next site at this address is another
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def server(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """Serves a folder to this machine alone; port 0 is any that is free. ``serve_forever`` runs it."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_Handler, directory=str(folder)))


def address(serving: http.server.ThreadingHTTPServer) -> str:
    return f"http://localhost:{serving.server_port}/"
