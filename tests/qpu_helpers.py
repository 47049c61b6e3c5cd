"""What tests of the QPU's edge share: another server, an answer with chains, and all texts of an error."""

import pickle
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from spingrad.qpu import Chip, ServiceError, StepError
from spingrad.qpu.packing import Ising, Page, Programmed
from spingrad.qpu.service import encoded
from spingrad.testing.sapi.annealer import Annealer
from spingrad.testing.sapi.chip import working_chip
from spingrad.testing.sapi.wire import decode_problem


@contextmanager
def stranger() -> Iterator[tuple[str, list[str]]]:
    """Another server on this machine, and the tokens that arrived there."""
    tokens: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers.get("X-Auth-Token", ""))
            self.send_error(404)

        do_POST = do_DELETE = do_CONNECT = do_GET  # noqa: N815, names of http.server

    with serving(Handler) as url:
        yield url, tokens


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a silent server on this machine."""

    class Handler(handler):  # type: ignore[valid-type, misc]
        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def an_answer(num_reads: int = 12) -> tuple[Programmed, dict[str, Any]]:
    """A problem with chains, and what the emulator would answer."""
    chip = working_chip("pegasus", 2, 0.0, 0)
    own = Chip(str(chip.identity["name"]), None, chip.properties)
    from spingrad.qpu.embedding import _search

    page = Page.of(own, list(_search(own, {5: 2, 3: 1})))
    rng = np.random.default_rng(0)
    sizes = [len(clique) for clique in page.cliques]
    programmed = page.program([Ising(rng.normal(size=n), np.triu(rng.normal(size=(n, n)), 1)) for n in sizes])
    params = {"num_reads": num_reads, "auto_scale": False}
    annealer = Annealer(chip, num_sweeps=2)
    answer = annealer.answer(decode_problem("ising", encoded(programmed, own), chip), params, rng)
    timing = {"qpu_access_time": 15341.25, "qpu_programming_time": 15108.0, "qpu_sampling_time": 233.25}
    return programmed, answer | {"timing": timing}


def texts(error: BaseException) -> list[str]:
    """An error in every form in which it is shown or sent on, with those behind it."""
    texts = ["".join(traceback.format_exception(error))]
    seen: BaseException | None = error
    while seen is not None:
        texts += [str(seen), repr(seen), repr(vars(seen))]
        texts += [pickle.dumps(seen).decode("latin1")] if isinstance(seen, ServiceError | StepError) else []
        seen = seen.__cause__ or seen.__context__
    return texts
