"""Serves `whale run --metrics-port`: /metrics in Prometheus' text format, and /healthz, which is 200 if all ranks are
up.

Decision: 0083.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from whale.errors import ClusterError
from whale.launcher.job.progress import RunProgress

LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 16
_READ_S = 5.0
_FREE_S = 1.0  # a client may connect again before the thread of its previous connection has ended


def parse_address(text: str) -> tuple[str, int]:
    """Parses the value of --metrics-port, ``port`` or ``address:port``; the address defaults to loopback.

    Raises:
        ClusterError: the value has neither form.
    """
    found = re.fullmatch(r"(?:([A-Za-z0-9_.-]{1,253}):)?([0-9]{1,5})", text)
    if found is None or int(found[2]) > 65535:
        raise ClusterError(
            "a port for metrics cannot be read",
            given=f"--metrics-port {text}",
            expected="PORT, which only this host can reach (9400), or ADDRESS:PORT (0.0.0.0:9400)",
            action="give --metrics-port 9400, for example, or 0 for any free port",
        )
    return found[1] or LOOPBACK, int(found[2])


@contextmanager
def serve_metrics(address: tuple[str, int], progress: RunProgress) -> Iterator[str]:
    """Serves metrics over HTTP while the context is open, in threads of its own. Requests cannot change anything in the
    run.

    Yields:
        The URL of the metrics.

    Raises:
        ClusterError: the server cannot listen at that address.
    """
    try:
        server = _MetricsServer(address, progress)
    except OSError as error:
        raise ClusterError(
            "the port for metrics cannot be opened",
            given=f"--metrics-port {address[0]}:{address[1]}",
            reason=error.strerror or error,
            expected="a free port on an address of this host",
            action="give --metrics-port another port, or 0 for any free one",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="whale-metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{address[0]}:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], progress: RunProgress) -> None:
        self.progress = progress
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, _MetricsHandler)

    def server_bind(self) -> None:
        """Binds the port without asking a name service for this host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection; if `MOST_CONNECTIONS` are open, waits a second for one to end, else
        refuses.
        """
        if self._free.acquire(timeout=_FREE_S):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one connection and then frees its place among the `MOST_CONNECTIONS`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of a connection, such as a client that hangs up."""


class _MetricsHandler(BaseHTTPRequestHandler):
    timeout = _READ_S
    server: _MetricsServer
    server_version, sys_version = "whale", ""

    def do_GET(self) -> None:
        """Answers a GET request. The protocol is HTTP 1.0, so that each connection ends after one answer."""
        progress = self.server.progress
        if self.path == "/metrics":
            self._send(200, "text/plain; version=0.0.4; charset=utf-8", progress.format_metrics())
        elif self.path == "/healthz":
            up = progress.is_complete
            self._send(200 if up else 503, "text/plain", "ok\n" if up else "not all ranks are up\n")
        else:
            self._send(404, "text/plain", "only /metrics and /healthz exist here\n")

    def _send(self, code: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppresses the base class's log of every request."""
