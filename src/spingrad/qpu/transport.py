"""HTTP with hard limits: seconds for a whole request and bytes for its reply, whatever the server does.

The limits of ``requests`` and ``urllib3`` hold for a single read, so a server that sends a byte now and then
is never too late. Here another thread makes the request, and the caller waits for it. At the deadline, or on
Ctrl-C, the caller shuts down the socket and goes on. No byte is sent after that.
"""

import io
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import requests
from dwave.cloud.utils.http import PretimedHTTPAdapter

LARGEST = 16 * 2**20  # bytes of a reply, as sent and inflated; 10,000 reads of a full chip take 10 MB
CHUNK = 2**16
SLICE = 0.1  # seconds of a single wait: Windows cannot interrupt one with Ctrl-C


class ReplyError(Exception):
    """A reply that is too large or in an encoding that was not asked for."""


class Connection:
    """The connection of one session, which serves one request at a time and can be aborted by any thread."""

    def __init__(self) -> None:
        self.was_open = False  # whether anything can have been sent
        self._aborted = self._done = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def run(self, work: Callable[[], None], seconds: float, clean_up: Callable[[], None]) -> bool:
        """Do the work in another thread and wait for it; returns whether it was done in time.

        If not, the connection is aborted for good. The thread calls ``clean_up`` as soon as it notices.
        """
        self._done = self.was_open = False
        self._ended.clear()

        def run() -> None:
            work()
            with self._lock:
                self._done = not self._aborted
                self._release()
            self._ended.set()
            if not self._done:
                clean_up()

        end = time.monotonic() + seconds
        try:
            threading.Thread(target=run, name="spingrad request", daemon=True).start()
            while not self._ended.wait(max(min(SLICE, end - time.monotonic()), 0.0)):
                if time.monotonic() >= end:
                    break
        finally:  # also after Ctrl-C
            self.abort()
        return self._done

    def abort(self) -> None:
        """Shut down the socket and let none be opened, unless the work is done."""
        with self._lock:
            if self._done:
                return
            self._aborted = True
            if self._socket is not None:
                with suppress(OSError):  # the server may have closed it already
                    self._socket.shutdown(socket.SHUT_RDWR)
        self._ended.set()

    def watch(self, new: socket.socket) -> None:
        """Note the socket of the request, before anything is sent on it."""
        with self._lock:
            if self._aborted:
                raise ConnectionAbortedError("the time allowed for this request is over")
            self._release()
            # A duplicate, since TLS and http.client detach and close the socket while it is still in use.
            self._socket = socket.socket(fileno=socket.dup(new.fileno()))
            self.was_open = True

    def _release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class BoundedAdapter(PretimedHTTPAdapter):  # type: ignore[misc]
    """D-Wave's adapter whose sockets are watched and whose replies are bounded.

    Args:
        connection: Is told of every socket.
        **settings: As in :class:`requests.adapters.HTTPAdapter`.
    """

    def __init__(self, connection: Connection, **settings: Any) -> None:
        self.connection = connection
        super().__init__(**settings)

    def init_poolmanager(self, *args: Any, **settings: Any) -> None:
        super().init_poolmanager(*args, **settings)
        _watch(self.poolmanager, self.connection)

    def proxy_manager_for(self, proxy: str, **settings: Any) -> Any:
        known = proxy in self.proxy_manager
        manager = super().proxy_manager_for(proxy, **settings)
        if not known:
            _watch(manager, self.connection)
        return manager

    def send(self, request: Any, **settings: Any) -> requests.Response:
        response: requests.Response = super().send(request, **(settings | {"stream": True}))
        try:
            response.raw = io.BytesIO(self._body(response))
        except BaseException:
            response.close()
            raise
        return response

    def _body(self, response: requests.Response) -> bytes:
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", "deflate"):
            raise ReplyError(
                f"expected a reply in gzip or not compressed, got the encoding {encoding[:50]!r}; check the "
                "endpoint, and the proxy if there is one"
            )
        body = bytearray()
        while chunk := response.raw.read(CHUNK, decode_content=False):
            body += chunk
            if len(body) > LARGEST:
                raise _too_large("")
        return bytes(body) if encoding == "identity" else _inflated(body)


def bound(session: requests.Session) -> Connection:
    """Put hard limits on all requests of a session; the connection that is returned makes them."""
    connection = Connection()
    session.headers["Accept-Encoding"] = "gzip"
    for prefix, adapter in list(session.adapters.items()):
        retries = adapter.max_retries  # type: ignore[attr-defined]
        session.mount(prefix, BoundedAdapter(connection, max_retries=retries))
    return connection


def _inflated(body: bytearray) -> bytes:
    """A compressed body, inflated up to the limit."""
    stream = zlib.decompressobj(wbits=47)  # gzip or zlib, by its header
    content = stream.decompress(body, LARGEST + 1)
    if len(content) > LARGEST:
        raise _too_large(" once inflated")
    if not stream.eof or stream.unused_data:
        raise zlib.error("the compressed reply is damaged or incomplete")
    return content


def _too_large(when: str) -> ReplyError:
    return ReplyError(
        f"expected a reply of at most {LARGEST} bytes{when}, got more; the rest was not read. Check the "
        "endpoint, and the proxy if there is one"
    )


def _watch(manager: Any, connection: Connection) -> None:
    """Let all connections of a pool manager of urllib3 tell ``connection`` of their sockets."""
    pools = manager.pool_classes_by_scheme
    manager.pool_classes_by_scheme = {scheme: _watched(pool, connection) for scheme, pool in pools.items()}


def _watched(pool: Any, connection: Connection) -> Any:
    class Watched(pool.ConnectionCls):  # type: ignore[misc]
        def _new_conn(self) -> socket.socket:
            new: socket.socket = super()._new_conn()
            try:
                connection.watch(new)
            except BaseException:
                new.close()
                raise
            return new

        def request(self, *args: Any, **settings: Any) -> None:
            if self.sock is not None:  # a connection that an earlier request has left open
                connection.watch(self.sock)
            super().request(*args, **settings)

    return type(pool.__name__, (pool,), {"ConnectionCls": Watched})
