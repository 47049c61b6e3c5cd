"""Downloads against a server that drips, lies, never ends or never begins."""

import hashlib
import os
import shutil
import ssl
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from spingrad_lab.data.download import DataError, download
from spingrad_lab.data.files import Known, fetch

CONTENT = bytes(range(256)) * 1000
SUM = hashlib.sha256(CONTENT).hexdigest()
KNOWN = Known(len(CONTENT), SUM)

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        with suppress(OSError):  # the client closes the connection
            getattr(self, f"do_{self.path.strip('/').replace('-', '_')}")()

    def begin(self, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def do_file(self):
        self.begin()
        self.wfile.write(CONTENT)

    def do_slow(self):
        time.sleep(0.3)
        self.do_file()

    def do_none(self):
        self.send_error(404)

    def do_short(self):
        self.begin()
        self.wfile.write(CONTENT[:-1])

    def do_broken_off(self):
        self.begin(Content_Length=str(len(CONTENT)))
        self.wfile.write(CONTENT[:1000])

    def do_wrong(self):
        self.begin()
        self.wfile.write(CONTENT[::-1])

    def do_announced(self):
        self.begin(Content_Length="1000000000000")

    def do_bomb(self):
        self.begin(Content_Encoding="gzip")
        self.do_endless()

    def do_endless(self):
        self.begin()
        while True:
            self.wfile.write(CONTENT)
            self.server.sent += len(CONTENT)

    def do_drip(self):
        self.begin()
        self.drip()

    def do_drip_of_headers(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Endless: ")
        self.drip()

    def drip(self):
        while True:
            self.wfile.write(b"x")
            time.sleep(0.05)

    def do_moved(self):
        self.begin(302, Location="/file")

    def do_to_http(self):
        self.begin(302, Location=f"http://127.0.0.1:{self.server.server_port}/file")

    def do_to_disk(self):
        self.begin(302, Location="file:///etc/passwd")

    def do_circle(self):
        self.begin(302, Location="/circle")

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *args):
        pass

    def finish_request(self, request, address):
        request.do_handshake()  # in the thread of the request
        super().finish_request(request, address)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key and a certificate for 127.0.0.1, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    options += " -addext subjectAltName=IP:127.0.0.1 -keyout key -out certificate"
    subprocess.run(["openssl", *options.split()], cwd=folder, check=True, capture_output=True)
    (folder / "both").write_bytes((folder / "key").read_bytes() + (folder / "certificate").read_bytes())
    return folder


@pytest.fixture
def server(certificate, tmp_path, monkeypatch):
    """A server with TLS that the client trusts; no data file is found elsewhere."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "certificate"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SPINGRAD_DATA", raising=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "both")
    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked, server.sent = [], 0
        server.url = f"https://127.0.0.1:{server.server_port}"
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        server.block_on_close = False


def left_in(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_download_is_checked_and_kept_with_the_permissions_of_the_umask(tmp_path, server):
    old = os.umask(0o027)
    try:
        assert fetch("a/file", KNOWN, f"{server.url}/moved") == CONTENT
    finally:
        os.umask(old)
    assert fetch("a/file", KNOWN, f"{server.url}/file") == CONTENT
    assert server.asked == ["/moved", "/file"]
    folder = tmp_path / "cache/spingrad/a"
    assert left_in(folder) == ["file"]
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o640


FAULTS = {
    "none": "expected status 200, got 404",
    "short": "expected 256,000 bytes, got 255,999",
    "broken-off": "expected 256,000 bytes, got 1,000|IncompleteRead",
    "wrong": f"expected {SUM} but got",
    "announced": "expected 256,000 bytes, the server announces 1,000,000,000,000",
    "bomb": "Content-Encoding gzip",
    "endless": "expected 256,000 bytes, got more",
    "to-http": "expected an address with https, got http://",
    "to-disk": "expected an address with https, got file:///etc/passwd",
    "circle": "expected at most 5 redirects",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_answer_is_one_error_that_says_what_to_do(fault, tmp_path, server):
    with pytest.raises(DataError, match=FAULTS[fault]) as caught:
        fetch("a/file", KNOWN, f"{server.url}/{fault}")
    assert "point SPINGRAD_DATA at a folder that has it" in str(caught.value)
    assert left_in(tmp_path / "cache/spingrad/a") == []
    assert server.sent < 64 * 2**20  # an endless body is not read to any end


@pytest.mark.parametrize("fault", ["drip", "drip-of-headers"])
def test_a_dripping_answer_ends_at_the_deadline(fault, tmp_path, server, clock):
    begin = clock()
    with pytest.raises(DataError, match="until the deadline"):
        download(f"{server.url}/{fault}", tmp_path / "file", *KNOWN, seconds=1)
    assert clock() - begin < 3
    assert left_in(tmp_path) == ["cache"] * (tmp_path / "cache").exists()


def test_a_server_that_never_begins_ends_at_the_deadline(tmp_path, server, clock):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/file"
        begin = clock()
        with pytest.raises(DataError, match=r"timed out|until the deadline"):
            download(url, tmp_path / "file", *KNOWN, seconds=1)
        assert clock() - begin < 3


def test_an_unknown_certificate_and_plain_http_are_refused(tmp_path, server, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(DataError, match="CERTIFICATE_VERIFY_FAILED"):
        download(f"{server.url}/file", tmp_path / "file", *KNOWN)
    with pytest.raises(DataError, match="expected an address with https"):
        download(server.url.replace("https", "http"), tmp_path / "file", *KNOWN)
    assert server.asked == []


def test_a_wrong_file_in_the_cache_is_reported_and_left_as_it_is(tmp_path, server):
    path = tmp_path / "cache/spingrad/a/file"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[::-1])
    with pytest.raises(DataError, match="expected a file with SHA-256"):
        fetch("a/file", KNOWN, f"{server.url}/file")
    assert path.read_bytes() == CONTENT[::-1]
    assert server.asked == []


def test_the_part_that_a_killed_process_left_is_replaced(tmp_path, server):
    (tmp_path / ".file.part").write_bytes(b"begun")
    download(f"{server.url}/file", tmp_path / "file", *KNOWN)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert left_in(tmp_path) == ["file"]


WORKER = """
import sys
from pathlib import Path
from spingrad_lab.data.download import download
download(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


def test_eight_at_once_download_once(tmp_path, server):
    """Two processes of four threads each."""
    code = "import threading as t\n" + WORKER.replace("download(sys", "run = lambda: download(sys")
    code += "threads = [t.Thread(target=run) for _ in range(4)]\n"
    code += "[one.start() for one in threads]; [one.join() for one in threads]\n"
    command = [sys.executable, "-W", "error", "-c", code, f"{server.url}/slow", str(tmp_path / "file")]
    command += [str(len(CONTENT)), SUM]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(2)))
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 2
    assert server.asked == ["/slow"]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_full_disk_or_a_file_for_a_folder_is_an_error_that_names_it(tmp_path, server):
    (tmp_path / "text").write_text("my only copy")
    with pytest.raises(OSError, match="text"):
        download(f"{server.url}/file", Path(tmp_path / "text" / "file"), *KNOWN)
    assert (tmp_path / "text").read_text() == "my only copy"
