"""Servers that try to hold a client for ever or to fill its memory, to test that the client's limits hold."""

import itertools
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PAUSE = 0.05  # seconds between two bytes of a server that drips
BOMB = 2**30  # bytes of a bomb once inflated
START = b"HTTP/1.1 200 OK\r\n"
MEDIA = b"Content-Type: application/vnd.dwave.sapi.solver-definition-list+json; version=3.0.0\r\n"
CHUNK = b"10000\r\n" + b" " * 2**16 + b"\r\n"


def _drip(text: bytes) -> Iterator[bytes]:
    for byte in text:
        yield bytes([byte])
        time.sleep(PAUSE)


def _silent() -> Iterator[bytes]:
    while True:
        yield b""
        time.sleep(PAUSE)


def _headers(*lines: bytes) -> bytes:
    return START + MEDIA + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def _bomb(encoding: str, wbits: int) -> Iterator[bytes]:
    stream, spaces = zlib.compressobj(wbits=wbits), b" " * 2**20
    start = stream.flush(zlib.Z_FULL_FLUSH)
    block = stream.compress(spaces) + stream.flush(zlib.Z_FULL_FLUSH)  # can follow on itself
    body = start + block * (BOMB // len(spaces))
    yield _headers(f"Content-Encoding: {encoding}".encode(), b"Content-Length: %d" % len(body)) + body


KINDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "silent": _silent,
    "status line drips": lambda: _drip(b"HTTP/1.1 200 " + b"O" * 10_000),
    "headers drip": lambda: _drip(START + b"X-Header: " + b"x" * 10_000),
    "endless headers": lambda: itertools.chain([START], itertools.repeat(b"X: " + b"x" * 9_000 + b"\r\n")),
    "endless 100 Continue": lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body drips": lambda: itertools.chain([_headers(b"Content-Length: 100000")], _drip(b" " * 10_000)),
    "body drips, then closes": lambda: itertools.chain(
        [_headers(b"Connection: close")], _drip(b" " * 10_000)
    ),
    "chunks drip": lambda: itertools.chain(
        [_headers(b"Transfer-Encoding: chunked")], _drip(b"1\r\n \r\n" * 10_000)
    ),
    "endless body": lambda: itertools.chain(
        [_headers(b"Transfer-Encoding: chunked")], itertools.repeat(CHUNK)
    ),
    "long body": lambda: itertools.chain(
        [_headers(b"Content-Length: 10000000000")], itertools.repeat(b" " * 2**16)
    ),
    "gzip bomb": lambda: _bomb("gzip", 31),
    "zlib bomb": lambda: _bomb("deflate", 15),
    "another encoding": lambda: iter([_headers(b"Content-Encoding: br", b"Content-Length: 9"), b"\x0b" * 9]),
    "TLS drips": lambda: _drip(b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc" + b"\x03" * 10_000),
}
"""What a server sends on every connection, whatever it is asked."""


@contextmanager
def hostile_server(kind: str) -> Iterator[int]:
    """A server of one of the ``KINDS``; its port on 127.0.0.1 is returned."""
    pieces, over = KINDS[kind], threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client may close it at any time
            connection.settimeout(1.0)
            if "TLS" not in kind:
                connection.recv(2**16)
            for piece in pieces():
                if over.is_set():
                    return
                connection.sendall(piece)
            over.wait(30.0)

    def listen() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

    threads = [threading.Thread(target=listen)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            for thread in threads:
                thread.join()


@contextmanager
def full_server() -> Iterator[int]:
    """A port on 127.0.0.1 whose queue is full, so that no connection comes about (on Linux)."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = []
        try:
            for _ in range(4):
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex(listener.getsockname())
            time.sleep(0.1)
            yield listener.getsockname()[1]
        finally:
            for connection in waiting:
                connection.close()
