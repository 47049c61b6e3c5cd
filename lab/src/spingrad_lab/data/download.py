"""Downloads that end: by a deadline, after a known number of bytes, over https only.

pooch checks the SHA-256 and puts the file in its place. It bounds neither the time nor the bytes of a
download, so the transfer is ours.
"""

import http.client
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
import pooch  # type: ignore[import-untyped]
from filelock import FileLock, Timeout

from spingrad._files import flush_folder, write_new

PART = 64 * 1024
MOST_REDIRECTS = 5


class DataError(ValueError):
    """A data file is missing or not the expected one; the message says what was expected and what to do."""


def download(url: str, path: Path, size: int, sha256: str, *, seconds: float | None = None) -> None:
    """Put the file at ``path`` once its size and sum are right; nothing but a lock file stays beside it.

    Of several processes, the first downloads and the others wait for it.

    Args:
        url: The source: https, also after redirects.
        path: Where the file belongs; what is there already is left as it is.
        size: Its size in bytes; the transfer ends as soon as there is one more.
        sha256: Its SHA-256 in hexadecimal.
        seconds: Time for everything; by default a minute, and ten seconds more per megabyte.

    Raises:
        DataError: The file could not be had in time, or is not the expected one.
        OSError: It could not be written.
    """
    seconds = 60 + size / 100_000 if seconds is None else seconds
    end = time.monotonic() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")

    def transfer(url: str, output: str, _: Any) -> None:
        part.unlink(missing_ok=True)  # of a process that was killed
        try:
            write_new(part, _received(url, size, end))
            os.replace(part, output)
        finally:
            part.unlink(missing_ok=True)

    pooch.get_logger().setLevel("WARNING")
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=seconds, poll_interval=0.05):
            if not path.exists():
                pooch.retrieve(url, sha256, path.name, path.parent, downloader=transfer)
                flush_folder(path.parent)
    except Timeout:
        raise DataError(f"another process has been downloading it for {seconds:.0f} seconds") from None
    except DataError:
        raise
    except ValueError as error:  # of pooch, about the sum
        raise DataError(str(error)) from None


def _received(url: str, size: int, end: float) -> Iterator[bytes]:
    """The body of the answer, in parts; every fault and the deadline are a :class:`DataError`."""
    transfer = _Transfer(url, size, end)
    transfer.start()
    count = 0
    try:
        while part := transfer.parts.get(timeout=max(end - time.monotonic(), 0.001)):
            if isinstance(part, Exception):
                raise DataError(str(part) or type(part).__name__)
            count += len(part)
            yield part
    except queue.Empty:
        raise DataError(f"expected {size:,} bytes, got {count:,} until the deadline") from None
    finally:
        transfer.stop()


class _Transfer(threading.Thread):
    """Reads from the network in a thread of its own, so that nothing there can hold up the caller.

    ``parts`` gets the body in parts, then ``b""`` or an error.
    """

    def __init__(self, url: str, size: int, end: float) -> None:
        super().__init__(daemon=True)
        self.url, self.size, self.end = url, size, end
        self.parts: queue.Queue[bytes | Exception] = queue.Queue(maxsize=16)
        self.connection: _Connection | None = None
        self.stopped = False

    def run(self) -> None:
        try:
            for part in self._body():
                self.parts.put(part)
                if self.stopped:
                    return
            self.parts.put(b"")
        except Exception as error:  # whatever it is, the caller shall see it
            self.parts.put(error)
        finally:
            if self.connection is not None:
                self.connection.end()

    def stop(self) -> None:
        """Close the socket, whatever it is doing, and let a waiting ``put`` go on."""
        self.stopped = True
        if self.connection is not None:
            self.connection.interrupt()
        with suppress(queue.Empty):
            while True:
                self.parts.get_nowait()

    def _body(self) -> Iterator[bytes]:
        count = 0
        with closing(self._answer()) as answer:
            self._check(answer)
            while part := answer.read1(min(PART, self.size - count + 1)):
                count += len(part)
                if count > self.size:
                    raise ValueError(f"expected {self.size:,} bytes, got more")
                yield part
        if count < self.size:
            raise ValueError(f"expected {self.size:,} bytes, got {count:,}")

    def _answer(self) -> http.client.HTTPResponse:
        url = self.url
        for _ in range(MOST_REDIRECTS + 1):
            place = urlsplit(url)
            if place.scheme != "https" or not place.hostname:
                raise ValueError(f"expected an address with https, got {url}")
            self.connection = _Connection(place, max(self.end - time.monotonic(), 0.001))
            target = (place.path or "/") + (f"?{place.query}" if place.query else "")
            headers = {"Accept-Encoding": "identity", "User-Agent": "spingrad-lab"}
            self.connection.request("GET", target, headers=headers)
            answer = self.connection.getresponse()
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            url = urljoin(url, answer.headers.get("Location", ""))
            answer.close()
            self.connection.end()
        raise ValueError(f"expected at most {MOST_REDIRECTS} redirects, got more")

    def _check(self, answer: http.client.HTTPResponse) -> None:
        """Refuse an answer that cannot be the file before its body is read."""
        if answer.status != 200:
            raise ValueError(f"expected status 200, got {answer.status} {answer.reason}")
        if (coding := answer.headers.get("Content-Encoding", "identity")) != "identity":
            raise ValueError(f"expected the file as it is, got one with Content-Encoding {coding}")
        if answer.length not in (None, self.size):
            raise ValueError(f"expected {self.size:,} bytes, the server announces {answer.length:,}")


class _Connection(http.client.HTTPSConnection):
    """A connection, by proxy if there is one, whose socket can be closed during the TLS handshake too."""

    def __init__(self, place: SplitResult, timeout: float) -> None:
        self.open_socket: ssl.SSLSocket | None = None
        self.server = place.hostname or ""
        host, port = self.server, place.port or 443
        proxy = urlsplit(getproxies().get("https", ""))
        tunnel = proxy.hostname and not proxy_bypass(host)
        if tunnel:
            host, port = proxy.hostname or "", proxy.port or 80
        super().__init__(host, port, timeout=timeout)
        if tunnel:
            self.set_tunnel(self.server, place.port or 443)

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        context = ssl.create_default_context()
        context.load_verify_locations(certifi.where())
        # Kept: http.client forgets the socket of an answer after which the server closes the connection.
        self.sock = self.open_socket = context.wrap_socket(
            self.sock, server_hostname=self.server, do_handshake_on_connect=False
        )
        self.sock.do_handshake()

    def interrupt(self) -> None:
        """From another thread: let whatever waits for the socket fail at once."""
        if self.open_socket is not None:
            with suppress(OSError):
                self.open_socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self.close()
        if self.open_socket is not None:
            self.open_socket.close()
