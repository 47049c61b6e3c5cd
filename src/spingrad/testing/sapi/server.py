"""The HTTP server of the emulator, with injected network faults."""

import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from spingrad.testing.sapi.api import Api, HTTPRequest, Reply, failure
from spingrad.testing.sapi.faults import Fault


class Request(NamedTuple):
    """An entry of the server's log; the subject is the label or the id that the request names.

    Example:
        >>> from spingrad.qpu import QPUService
        >>> from spingrad.testing.sapi import Sapi
        >>> with Sapi(size=2) as sapi, sapi.configured():
        ...     service = QPUService()
        ...     [(request.method, request.stage) for request in sapi.requests]
        [('GET', 'solvers')]
    """

    time: float
    method: str
    stage: str
    fault: str | None
    subject: str


class Server(ThreadingHTTPServer):
    """Serves the API on 127.0.0.1; closing it ends all its threads and sockets."""

    daemon_threads = False  # so that server_close waits for them

    def __init__(self, api: Api, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.api = api
        self.requests: list[Request] = []
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        for connection in list(self._connections):
            with suppress(OSError):  # the client may have closed it already
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def close_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client may close its connection at any time
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, with the faults that are injected into them."""

    protocol_version = "HTTP/1.1"  # the client keeps its connections open
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing; the log is ``server.requests``."""

    def _serve(self) -> None:
        request = self._request()
        fault = self.server.api.service.faults.take(request.stage)
        kind = fault.kind if fault else None
        self.server.requests.append(
            Request(time.time(), request.method, request.stage, kind, request.subject)
        )
        if fault is None:
            self._send(self.server.api.respond(request))
        else:
            self._fail(request, fault)

    def _request(self) -> HTTPRequest:
        url = urlsplit(self.path)
        body = self._body()
        path = tuple(part for part in url.path.split("/") if part)
        return HTTPRequest(self.command, path, dict(parse_qsl(url.query)), self.headers, body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return body

    def _fail(self, request: HTTPRequest, fault: Fault) -> None:
        """Answer a request as the kind of fault demands, see ``faults.TRANSPORT``."""
        api = self.server.api
        match fault.kind:
            case "status":
                self._send(replace(failure(fault.code, fault.message), headers=fault.headers))
            case "redirect":
                self._send(replace(failure(307, "moved"), headers={"Location": fault.to + self.path}))
            case "reset":
                self._reset()
            case "reset_after":
                api.respond(request)
                self._reset()
            case "late":
                self._reset()
                self._sleep(fault.seconds)
                api.respond(request)
            case "slow":
                self._sleep(fault.seconds)
                self._send(api.respond(request))
            case "drip":
                self._drip(api.respond(request), fault.seconds)
            case "garbage":
                self._send(Reply(b"<html>proxy error", request.media))
            case "media":
                self._send(Reply(b"[]"))
            case "empty":
                self._send(Reply(b"[]", request.media))
            case "truncate":
                self._send(api.respond(request), share=0.5)

    def _send(self, reply: Reply, share: float = 1.0) -> None:
        """Write a reply; with a ``share`` below 1 the body ends early."""
        self._send_headers(reply)
        self.wfile.write(reply.body[: int(share * len(reply.body))])
        if share < 1:
            self.close_connection = True

    def _drip(self, reply: Reply, seconds: float) -> None:
        """Write a reply byte by byte, and reset the connection if that takes longer than some seconds."""
        end = time.monotonic() + seconds
        self._send_headers(reply)
        for byte in reply.body:
            self.wfile.write(bytes([byte]))
            self._sleep(0.05)
            if time.monotonic() > end:
                self._reset()
                break

    def _send_headers(self, reply: Reply) -> None:
        self.send_response(reply.code)
        self.send_header("Content-Type", reply.media)
        self.send_header("Content-Length", str(len(reply.body)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _sleep(self, seconds: float) -> None:
        self.server.api.service.closing.wait(seconds)

    def _reset(self) -> None:
        """Close the connection with an RST, without the regular handshake."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()
        self.close_connection = True
