"""Serves a site on this machine: browsers offer WebGPU to pages from localhost, but not to pages from files."""

from __future__ import annotations

import functools
import http.server
from pathlib import Path
from typing import Any


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # The system's table of types may be wrong (the registry on Windows), and browsers refuse modules of another type.
    extensions_map = {  # noqa: RUF012
        ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".json": "application/json",
        ".bin": "application/octet-stream", ".gz": "application/octet-stream", "": "application/octet-stream",
    }  # fmt: skip

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")  # another site may be served here later
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def server(folder: Path, port: int) -> http.server.ThreadingHTTPServer:
    """Serves a folder to this machine alone; port 0 is any free one. ``serve_forever`` runs it."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_Handler, directory=str(folder)))


def address(serving: http.server.ThreadingHTTPServer) -> str:
    return f"http://localhost:{serving.server_port}/"
