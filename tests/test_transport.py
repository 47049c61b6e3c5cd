"""Requests to the QPU's service end at their deadline and stay small, whatever the server does.

Times and memory are measured by the lab: ``spingrad-lab bench qpu-faults``.
"""

import gzip
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
import requests
from qpu_helpers import serving

from spingrad.qpu import QPUService, ServiceError, transport
from spingrad.qpu.service import _checked_endpoint
from spingrad.testing.sapi import Sapi
from spingrad.testing.sapi.hostile import KINDS, full_server, hostile_server

pytestmark = pytest.mark.usefixtures("sapi_env")

DEADLINE = 1.0
PATIENCE = 60.0  # a busy machine is slow, but the servers would go on for eight minutes
AT_THE_LIMIT = {
    "endless headers": "more than 100 headers",
    "endless body": f"at most {transport.LARGEST} bytes",
    "long body": f"at most {transport.LARGEST} bytes",
    "gzip bomb": f"at most {transport.LARGEST} bytes once inflated",
    "zlib bomb": f"at most {transport.LARGEST} bytes once inflated",
    "another encoding": "not compressed, got the encoding 'br'",
}


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("DWAVE_API_TOKEN", "CANARY-token")


def connecting(url, deadline):
    """The error of a connection to a server, and the seconds that it took."""
    begin = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        QPUService(endpoint=url, request_timeout=deadline)
    return str(caught.value), time.monotonic() - begin


def wait_for_requests():
    """Wait for the threads that were left behind at a deadline."""
    while any(thread.name == "spingrad request" for thread in threading.enumerate()):
        time.sleep(0.01)


def test_a_request_that_another_thread_aborts_does_not_wait_for_its_work():
    connection, over, cleaned = transport.Connection(), threading.Event(), threading.Event()
    threading.Timer(0.1, connection.abort).start()
    begin = time.monotonic()
    assert not connection.run(lambda: over.wait() and None, PATIENCE, cleaned.set)
    assert time.monotonic() - begin < 0.5 * PATIENCE
    over.set()
    assert cleaned.wait(PATIENCE)


def test_a_socket_that_opens_after_the_abort_is_closed_at_once():
    class Pool:
        class ConnectionCls:
            def _new_conn(self):
                return late

    late, other = socket.socketpair()
    connection = transport.Connection()
    connection.abort()
    with other, pytest.raises(ConnectionAbortedError):
        transport._watched(Pool, connection).ConnectionCls()._new_conn()
    assert late.fileno() == -1


def test_every_request_ends_whatever_the_server_does():
    def case(kind, scheme):
        with hostile_server(kind) as port:
            # A reply that is too large is to end at the limit of its size, also on a busy machine.
            deadline = PATIENCE if kind in AT_THE_LIMIT else DEADLINE
            return connecting(f"{scheme}://127.0.0.1:{port}", deadline)

    cases = [(kind, "https" if "TLS" in kind else "http") for kind in KINDS] + [("silent", "https")]
    with ThreadPoolExecutor(len(cases)) as pool:
        outcomes = list(pool.map(lambda own: case(*own), cases))
    for (kind, scheme), (message, seconds) in zip(cases, outcomes, strict=True):
        expected = AT_THE_LIMIT.get(kind, f"within {DEADLINE:.3g} s, got none or only a part")
        assert expected in message, (kind, scheme)
        assert seconds < PATIENCE, (kind, scheme)
        assert "CANARY" not in message


def test_a_connection_that_does_not_come_about_ends_too_and_nothing_was_sent():
    with (
        full_server() as port,
        pytest.raises(ServiceError, match="connection was closed") as caught,
    ):
        QPUService(endpoint=f"http://127.0.0.1:{port}", request_timeout=DEADLINE)
    assert caught.value.refused


def test_a_name_server_that_does_not_answer_holds_nobody_and_nothing_is_sent_later(monkeypatch):
    answered, real = threading.Event(), socket.getaddrinfo

    def slow(*args, **settings):
        answered.wait(PATIENCE)
        return real(*args, **settings)

    with Sapi(size=2, token="CANARY-token") as sapi:
        service = QPUService(endpoint=sapi.url, request_timeout=DEADLINE)
        sent = len(sapi.requests)
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        with pytest.raises(ServiceError, match=r"within 0\.2 s") as caught:
            service.find("label", 0.2)
        assert caught.value.refused
        answered.set()
        wait_for_requests()
        assert len(sapi.requests) == sent


def test_a_region_is_looked_up_within_the_time_limit(monkeypatch):
    monkeypatch.setenv("DWAVE_API_REGION", "eu-central-1")
    with hostile_server("headers drip") as port:
        monkeypatch.setenv("DWAVE_METADATA_API_ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(ConnectionError, match=r"'eu-central-1' could not be found .* within 0\.2 s"):
            QPUService(request_timeout=0.2)


def test_a_region_is_looked_up_without_the_token():
    regions = [{"code": "eu-central-1", "name": "Europe", "endpoint": "https://eu.dwavesys.com/sapi/v2/"}]
    media = {"Content-Type": "application/vnd.dwave.metadata.regions+json; version=1.0"}
    with server((media, json.dumps(regions).encode()), ({}, b"")) as (url, requests_):
        settings = {"region": "eu-central-1", "metadata_api_endpoint": url}
        assert _checked_endpoint(None, settings) == "https://eu.dwavesys.com/sapi/v2/"
    ((_, headers),) = requests_
    assert "X-Auth-Token" not in headers


def test_a_proxy_is_bounded_too(monkeypatch):
    with hostile_server("headers drip") as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with pytest.raises(ServiceError, match=r"within 0\.3 s"):
            QPUService(endpoint="https://qpu.dwavesys.com/sapi/v2/", request_timeout=0.3)
        wait_for_requests()


def test_a_definition_of_an_impossible_chip_is_refused(monkeypatch):
    with Sapi(size=2, token="CANARY-token") as sapi:
        for name, value in (
            ("num_qubits", 10**12),
            ("qubits", [-1]),
            ("couplers", [[0, 10**9]]),
            ("qubits", 7),
        ):
            with monkeypatch.context() as patch:
                patch.setitem(sapi.chip.definition["properties"], name, value)
                with pytest.raises(ServiceError, match="expected the definition of a QPU"):
                    QPUService(endpoint=sapi.url)


# One session


@contextmanager
def server(*replies):
    """A server that sends each reply in turn: a pair of headers and content, the last one dripping."""
    left, requests_ = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            requests_.append((self.client_address, dict(self.headers)))
            headers, content = left.pop(0)
            self.send_response(200)
            for name, value in ({"Content-Length": len(content)} | headers).items():
                self.send_header(name, str(value))
            self.end_headers()
            for byte in content if not left else [content]:
                self.wfile.write(byte if isinstance(byte, bytes) else bytes([byte]))
                time.sleep(0.01)

        def handle(self):
            try:
                super().handle()
            except OSError:
                """The client has closed the connection."""

    with serving(Handler) as url:
        yield f"{url}/", requests_


def get(session, connection, url, seconds=DEADLINE):
    """The content of a reply, the error, or None if the request was aborted."""
    found = []

    def work():
        try:
            found.append(session.get(url, timeout=PATIENCE).content)
        except Exception as error:
            found.append(error)

    done = connection.run(work, seconds, session.close)
    return found[0] if done else None


def test_replies_are_taken_plain_or_compressed_and_connections_are_kept():
    text = b"content" * 1000
    packed = gzip.compress(text)
    replies = [
        ({}, text),
        ({"Content-Encoding": "gzip"}, packed),
        ({"Content-Encoding": "gzip"}, packed[:-9]),
    ]
    with server(*replies, ({}, b"")) as (url, requests_), requests.Session() as session:
        session.trust_env = False
        connection = transport.bound(session)
        assert get(session, connection, url, PATIENCE) == text
        assert get(session, connection, url, PATIENCE) == text
        assert "damaged or incomplete" in str(get(session, connection, url, PATIENCE))
        assert len({client for client, _ in requests_}) == 1


def test_a_kept_connection_is_cut_too_and_the_session_is_not_used_again():
    with server(({}, b"first"), ({}, b"x" * 100_000)) as (url, requests_), requests.Session() as session:
        session.trust_env = False
        connection = transport.bound(session)
        assert get(session, connection, url, PATIENCE) == b"first"
        assert get(session, connection, url, 0.3) is None
        assert len({client for client, _ in requests_}) == 1
        wait_for_requests()
        assert get(session, connection, url, 0.3) is None
