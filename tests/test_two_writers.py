"""Two processes that save to one folder: each stopped or killed at each of its file operations."""

import builtins
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import threading
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from spingrad.checkpoint import Checkpoint

# Of the library, what changes a folder or looks at it.
CHANGES = ["open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir"]
LOOKS = ["listdir", "scandir", "stat"]


class Value:
    """A part that is one number: that of the save."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Killed(BaseException):
    """The process ends here."""


class Folder:
    """A folder, and what was saved to it: the step and the number of each save that returned."""

    def __init__(self, path):
        self.path, self.kept, self.numbers = path, [], itertools.count()

    def save(self, step, kind=Checkpoint, **settings):
        number = next(self.numbers)
        kind(self.path, value=Value([step, number]), **settings).save(step)
        self.kept.append((step, number))

    def check(self):
        """What a reader finds now: whole, and the newest state that was kept, or a newer one."""
        part = Value()
        step = Checkpoint(self.path, value=part).load()
        assert (step == 0) == (part.value is None)
        assert part.value is None or part.value[0] == step
        assert step >= max((kept for kept, _ in self.kept), default=0), (step, self.kept)


OTHERS = {
    "the same step": [3],
    "the same step twice": [3, 3],
    "one step more": [4],
    "so much that all before is removed": [3, 4, 5],
}


@pytest.fixture
def at_operation(monkeypatch):
    """Call something before one operation of this thread on a folder, counted from 0."""
    local = threading.local()

    def watch(count, work):
        local.left, local.work = count, work

    def wrapped(real):
        def operation(place, *args, **kwargs):
            name = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fspath(place)
            if getattr(local, "work", None) and "/step-" in str(name) + "/step-" * ("/run" in str(name)):
                local.left -= 1
                if local.left < 0:
                    work, local.work = local.work, None
                    work()
            return real(place, *args, **kwargs)

        return operation

    for owner, name in [(os, name) for name in (*CHANGES, *LOOKS)] + [(builtins, "open")]:
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
    watch.reached = lambda: local.work is None
    return watch


def at_every_operation(at_operation, tmp_path, work, other):
    """Run ``work(folder)`` once for each of its operations, with ``other(folder)`` before it; how often."""
    for count in itertools.count():
        folder = Folder(tmp_path / str(count) / "run")
        for step in (1, 2):
            folder.save(step)
        at_operation(count, lambda folder=folder: other(folder))
        work(folder)
        if not at_operation.reached():
            at_operation(0, None)
            return count
        folder.check()
        folder.save(6)  # what is left over is in nobody's way
        folder.check()


@pytest.mark.filterwarnings("ignore:checkpoint .* is left out")
@pytest.mark.parametrize("fate", ["stopped", "killed"])
@pytest.mark.parametrize("steps", OTHERS.values(), ids=OTHERS)
def test_a_writer_at_each_of_its_operations_while_another_saves(at_operation, tmp_path, steps, fate):
    ended = Counter()

    def work(folder):
        try:
            folder.save(3)
        except (Killed, OSError, ValueError) as error:
            ended[type(error).__name__] += 1
        else:
            ended["saved"] += 1

    def other(folder):
        folder.check()
        for step in steps:
            folder.save(step)
            folder.check()
        if fate == "killed":
            raise Killed

    count = at_every_operation(at_operation, tmp_path, work, other)
    assert count > 30
    assert ended["Killed"] == (count if fate == "killed" else 0)
    assert ended["saved"] > (0 if fate == "killed" else 10)
    print(f"{count} operations: {dict(ended)}")


@pytest.mark.filterwarnings("ignore:checkpoint .* is left out")
def test_a_reader_at_each_of_its_operations_while_another_saves(at_operation, tmp_path):
    def work(folder):
        folder.check()

    def other(folder):
        for step in (3, 4, 5):
            folder.save(step)
        folder.kept = folder.kept[:2]  # the reader may have begun before

    assert at_every_operation(at_operation, tmp_path, work, other) > 10


@pytest.mark.parametrize("count", range(1, 5))
def test_a_reader_looks_at_older_saves_first(tmp_path, monkeypatch, count):
    """Two saves end, and two are half removed, after the reader has looked at some of them."""
    folder, other = Folder(tmp_path / "run"), Folder(tmp_path / "other")
    for place, steps in ((folder, (1, 2)), (other, (3, 4))):
        for step in steps:
            place.save(step)
    for path in list(other.path.glob("step-*")):
        (path / "manifest.jsonl").rename(path / "later")
        path.rename(folder.path / path.name)
    looks, exists = [], Path.exists

    def looked(path):
        there = exists(path)
        if path.name == "manifest.jsonl":
            looks.append(path)
            if len(looks) == count:
                for later in list(folder.path.glob("*/later")):
                    later.rename(later.with_name("manifest.jsonl"))
                for step in (1, 2):
                    (gone,) = folder.path.glob(f"step-00000000{step}.*/manifest.jsonl")
                    gone.unlink()
        return there

    monkeypatch.setattr(Path, "exists", looked)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is incomplete
        assert Checkpoint(folder.path, value=Value()).load() in (3, 4)


class Ranks:
    """The ranks of a group, as threads; where one ends, the others notice."""

    def __init__(self, size):
        self.size, self.texts, self.barrier = size, [""] * size, threading.Barrier(size, timeout=60)


class Threaded(Checkpoint):
    """A checkpoint whose ranks are threads."""

    def __init__(self, folder, ranks, rank, **parts):
        super().__init__(folder, **parts)
        self.ranks, self._rank, self._size = ranks, rank, ranks.size

    def _gather(self, own):
        self.ranks.texts[self._rank] = json.dumps(own)
        self.ranks.barrier.wait()
        texts = list(self.ranks.texts)
        self.ranks.barrier.wait()
        return [json.loads(text) for text in texts]


@pytest.mark.filterwarnings("ignore:checkpoint .* is left out", "ignore:.* was saved by 2 ranks")
@pytest.mark.parametrize("fate", ["stopped", "killed"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("steps", OTHERS.values(), ids=OTHERS)
def test_a_rank_of_two_at_each_of_its_operations_while_another_run_saves(
    at_operation, tmp_path, steps, rank, fate
):
    ended = Counter()

    def other(folder):
        folder.check()
        for step in steps:
            folder.save(step)
            folder.check()
        if fate == "killed":
            raise Killed

    for count in itertools.count():
        folder, ranks, reached = Folder(tmp_path / str(count) / "run"), Ranks(2), []
        for step in (1, 2):
            folder.save(step)

        def run(own, folder=folder, ranks=ranks, reached=reached, count=count):
            at_operation(count, (lambda: other(folder)) if own == rank else None)
            try:
                # A value of its own, so that each rank writes a file.
                Threaded(folder.path, ranks, own, value=Value([3, own])).save(3)
            except (Killed, OSError, ValueError, RuntimeError) as error:
                ranks.barrier.abort()
                ended[type(error).__name__] += 1
            else:
                ended["saved"] += 1
                folder.kept.append((3, own))
            reached += [at_operation.reached()] * (own == rank)
            at_operation(0, None)

        threads = [threading.Thread(target=run, args=(own,)) for own in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        folder.check()
        if not reached[0]:
            break
        folder.save(6)
        folder.check()
    assert count > (20 if rank == 0 else 4)
    print(f"rank {rank}, {count} operations: {dict(ended)}")


SAVES = 6


def race(path, seed, told):
    """One of the processes of a race: six saves, each of the step after the newest one it knows."""
    warnings.simplefilter("ignore")
    chance = random.Random(seed)
    checkpoint = Checkpoint(path, value=(part := Value([0, seed])))
    step = checkpoint.load()
    for _ in range(SAVES):
        time.sleep(chance.random() * 0.002)
        step += 1
        part.value = [step, seed]
        try:
            checkpoint.save(step)
        except (ValueError, FileNotFoundError) as error:  # there are newer ones
            told.put(("refused", type(error).__name__))
            step = checkpoint.load()
        else:
            told.put(("saved", step))
    told.close()
    told.join_thread()


def read(path, end, told):
    """The reader of a race."""
    warnings.simplefilter("ignore")
    newest = loads = 0
    while not end.is_set():
        part = Value()
        step = Checkpoint(path, value=part).load()  # raises an error where nothing is intact
        assert part.value is None or part.value[0] == step
        assert step >= newest
        newest, loads = step, loads + 1
    told.put(("loads", loads))
    told.close()
    told.join_thread()


def ended(path, processes, seed):
    """Wait until the processes of a race have ended, and stop and kill some; how many were killed."""
    chance, killed = random.Random(seed), 0
    for process in processes:
        if seed % 3 == 1:  # stopped for a while, in the middle of anything
            time.sleep(chance.random() * 0.02)
            with suppress(ProcessLookupError):  # it has ended
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(chance.random() * 0.05)
                os.kill(process.pid, signal.SIGCONT)
        if seed % 3 == 2 and process is not processes[0]:
            time.sleep(chance.random() * 0.02)
            process.kill()
            killed += 1
    for process in processes:
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL)
    return killed


def races(tmp_path, count, sizes):
    context = multiprocessing.get_context("fork")  # four processes within milliseconds
    totals = Counter()
    for seed, size in itertools.product(range(count), sizes):
        path = tmp_path / f"{size}-{seed}"
        told = [context.Queue() for _ in range(size + 1)]
        end = context.Event()
        reader = context.Process(target=read, args=(path, end, told[0]))
        writers = [
            context.Process(target=race, args=(path, seed * size + i, told[i + 1])) for i in range(size)
        ]
        for process in (reader, *writers):
            process.start()
        totals["killed"] += ended(path, writers, seed)
        end.set()
        reader.join(120)
        assert reader.exitcode == 0
        kept = 0
        for queue in told:
            while not queue.empty():
                kind, value = queue.get()
                totals[kind] += value if kind == "loads" else 1
                kept = max(kept, value) if kind == "saved" else kept
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            part = Value()
            step = Checkpoint(path, value=part).load()
        assert part.value[0] == step >= kept > 0
        totals["races"] += 1
    return totals


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "count", [6, pytest.param(40, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.long)]
)
def test_races_of_two_and_four_lose_nothing(tmp_path, count):
    totals = races(tmp_path, count // 2, (2, 4))
    assert totals["races"] == count
    print(dict(totals))


def hold(path, ready, end):
    Checkpoint(path, value=Value(1)).save(1)
    checkpoint = Checkpoint(path, value=Value(1))
    checkpoint.save(2)
    ready.set()
    end.wait()


def test_a_second_process_is_warned_of_the_first_by_host_and_number(tmp_path):
    context = multiprocessing.get_context("forkserver")
    ready, end = context.Event(), context.Event()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    process = context.Process(target=hold, args=(tmp_path / "real", ready, end))
    process.start()
    assert ready.wait(60)
    checkpoint = Checkpoint(tmp_path / "link", value=Value(1))
    with pytest.warns(UserWarning, match=rf"\({re.escape(os.uname().nodename)}, process {process.pid}\)"):
        checkpoint.save(3)
    checkpoint.save(4)  # once is enough
    end.set()
    process.join()
    del checkpoint
    Checkpoint(tmp_path / "link", value=Value(1)).save(5)
    one, other = (Checkpoint(tmp_path / name, value=Value(1)) for name in ("real", "link"))
    one.save(6)
    other.save(7)  # one process may have two
