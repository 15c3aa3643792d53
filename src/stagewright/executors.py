"""Executors run many independent jobs: on the cores of this machine, or on a Ray cluster.

An executor has one method, `run`. Threads suit work that releases Python's lock, such as hashing,
compressing and writing; a cluster suits jobs and results that are small compared to the work.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from stagewright.errors import UserError

TRIES = 5
"""Attempts to run a job whose machine was lost."""
AHEAD = 7
"""Jobs that wait for a thread, in addition to those that run."""

Job = TypeVar("Job")
Result = TypeVar("Result")


class Executor(Protocol):
    """Runs jobs somewhere."""

    def run(
        self,
        function: Callable[[Job], Result],
        jobs: Iterable[Job],
        done: Callable[[Result], None],
    ) -> None:
        """Call `function` with every job, in any order, and `done` with every result.

        `jobs` are taken one by one as they are needed; `done` is called in the calling thread. The
        first exception, of a job, of `jobs` or of `done`, stops the run and is raised.
        """
        ...


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Threads:
    """Threads of this process."""

    def __init__(
        self, workers: int | None = None, most_at_once: Callable[[Any], int] | None = None
    ) -> None:
        """`workers`: threads, by default one per core.

        `most_at_once`: limit of running and waiting jobs, given the next one; bounds their memory.
        """
        self._workers = workers or cores()
        self._most_at_once = most_at_once

    def run(
        self,
        function: Callable[[Job], Result],
        jobs: Iterable[Job],
        done: Callable[[Result], None],
    ) -> None:
        """Like `Executor.run`; `done` is also called for jobs that ran when the run stopped."""
        busy: set[Future[Result]] = set()

        def collect(remaining: int) -> None:
            while len(busy) > remaining:
                for future in wait(busy, return_when=FIRST_COMPLETED).done:
                    busy.remove(future)
                    done(future.result())

        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="stagewright")
        try:
            for job in jobs:
                limit = self._workers + AHEAD
                if self._most_at_once is not None:
                    limit = min(limit, self._most_at_once(job))
                collect(max(0, limit - 1))
                busy.add(pool.submit(function, job))
            collect(0)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for future in busy:
                if not future.cancelled() and future.exception() is None:
                    done(future.result())


class Processes:
    """Processes of this machine, for jobs that compute in Python.

    A process takes about one CPU-second to start and to import what jobs need. So jobs run in this
    process, until the remaining ones are expected to take `worth` CPU-seconds in each of two or
    more processes. With as many long jobs as workers, the run ends one job's time later.
    """

    WORTH = 2.0
    """CPU-seconds of work of a process: twice as many as it takes to start."""

    def __init__(self, workers: int, worth: float = WORTH) -> None:
        """`workers`: limit of processes, which each run starts; 1: jobs run in this process."""
        self._workers, self._worth = workers, worth

    def run(
        self,
        function: Callable[[Job], Result],
        jobs: Iterable[Job],
        done: Callable[[Result], None],
    ) -> None:
        """Like `Executor.run`; function, jobs and results are pickled."""
        waiting = deque(jobs)
        begin, num_done = time.process_time(), 0
        while waiting:
            count = min(self._workers, len(waiting))
            if self._worth > 0:
                remaining = (time.process_time() - begin) / max(num_done, 1) * len(waiting)
                count = min(count, int(remaining / self._worth))
            if count > 1:
                _spread(count, function, waiting, done)
                return
            done(function(waiting.popleft()))
            num_done += 1


def _spread(
    count: int,
    function: Callable[[Job], Result],
    jobs: Iterable[Job],
    done: Callable[[Result], None],
) -> None:
    """Run jobs in `count` processes, which have ended and are joined on return."""
    context = multiprocessing.get_context("spawn")
    others = {*multiprocessing.active_children()}
    with ProcessPoolExecutor(count, mp_context=context, initializer=_follow_parent) as pool:
        busy = [pool.submit(function, job) for job in jobs]
        try:
            for future in as_completed(busy):
                done(future.result())
        except BaseException:
            for process in {*multiprocessing.active_children()} - others:
                process.terminate()  # a running job would delay the exception
            # The pool's thread reaps the processes, and `with` waits for that thread. After
            # `shutdown(wait=False)` a process could be reaped without an exit code.
            raise


def _follow_parent() -> None:
    """End this process with the one that started it, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was started by a pool"
    sentinel = parent.sentinel

    def follow() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)  # no process would receive the result of a running job

    threading.Thread(target=follow, daemon=True).start()


class RayCluster:
    """The machines of a Ray cluster; a job whose machine is lost runs again on another one."""

    def __init__(self, ray: Any) -> None:
        """`ray`: the module, connected to a cluster."""
        self._ray = ray

    @property
    def workers(self) -> int:
        """Cores of the cluster."""
        return int(self._ray.cluster_resources().get("CPU", 1))

    def run(
        self,
        function: Callable[[Job], Result],
        jobs: Iterable[Job],
        done: Callable[[Result], None],
    ) -> None:
        """Like `Executor.run`; function, jobs and results are pickled, the function once."""
        ray = self._ray
        task = ray.remote(num_cpus=1, max_retries=TRIES)(_call)
        shared = ray.put(function)
        busy: dict[Any, tuple[Job, int]] = {task.remote(shared, job): (job, 1) for job in jobs}
        try:
            while busy:
                (reference,), _ = ray.wait([*busy], num_returns=1)
                job, tries = busy.pop(reference)
                try:
                    result: Result = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise _cause(error) from error
                except ray.exceptions.RayError as error:
                    if tries == TRIES:
                        raise OSError(f"a share was lost {TRIES} times: {error}") from error
                    busy[task.remote(shared, job)] = job, tries + 1
                    continue
                done(result)
        except BaseException:
            for reference in busy:
                ray.cancel(reference, force=True)
            raise


@contextmanager
def ray_cluster(address: str | None = None) -> Generator[RayCluster]:
    """Connect to a Ray cluster; UserError if there is no Ray, or none answers.

    `address`: `host:port`, `ray://host:port` or `auto`; None: that of the environment, or a new
    cluster on this machine. An existing connection of the caller is used and kept.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise UserError(
            "engine ray: needs the package ray, here and on the cluster; install stagewright[ray]"
        ) from None
    connected = ray.is_initialized()
    if not connected:
        _connect(ray, address)
    try:
        yield RayCluster(ray)
    finally:
        if not connected:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    server = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:([0-9]{1,5})", address or "")
    try:
        if server is not None:
            # Ray itself tries for many minutes.
            socket.create_connection((server[1], int(server[2])), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, OverflowError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        failure = f"address {address}: no Ray cluster answers" if address else "Ray does not start"
        raise UserError(f"{failure}: {reason}") from None


def _call(function: Callable[[Job], Result], job: Job) -> Result:
    """Run a job on a machine of the cluster."""
    return function(job)


def _cause(error: Any) -> BaseException:
    """The exception of a job on another machine, as that machine raised it."""
    cause = error.cause
    if isinstance(cause, ImportError):
        return UserError(f"engine ray: a machine of the cluster lacks a package: {cause}")
    return cause if isinstance(cause, OSError | UserError) else error
