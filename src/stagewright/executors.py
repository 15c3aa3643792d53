"""Executors run many independent jobs: on the cores of this machine, or on a Ray cluster.

An executor has one method, `run`. Threads suit work that leaves Python's lock free, such as
hashing, compressing and writing; a cluster suits jobs and results that are small beside the work.
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

TRIES = 5  # of a job whose machine was lost
AHEAD = 7  # jobs that wait for a thread, beside those that run

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
        """Call `function` with every job, in any order.

        `jobs` are taken one by one as they are needed. `done` hears every result in the calling
        thread. The first exception, of a job, of `jobs` or of `done`, stops the run and is raised.
        """
        ...


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class InTurn:
    """One job after the other, in this process."""

    def run(
        self,
        function: Callable[[Job], Result],
        jobs: Iterable[Job],
        done: Callable[[Result], None],
    ) -> None:
        """As `Executor.run`; results are heard in the order of the jobs."""
        for job in jobs:
            done(function(job))


class Threads:
    """Threads of this process."""

    def __init__(
        self, workers: int | None = None, most_at_once: Callable[[Any], int] | None = None
    ) -> None:
        """`workers`: threads, by default one per core.

        `most_at_once` says how many jobs such as one may be under way or waiting at once, which
        bounds their memory.
        """
        self._workers = workers or cores()
        self._most_at_once = most_at_once

    def run(
        self,
        function: Callable[[Job], Result],
        jobs: Iterable[Job],
        done: Callable[[Result], None],
    ) -> None:
        """As `Executor.run`; `done` also hears of jobs that were under way when the run stopped."""
        busy: set[Future[Result]] = set()

        def collect(most: int) -> None:
            while len(busy) > most:
                for future in wait(busy, return_when=FIRST_COMPLETED).done:
                    busy.remove(future)
                    done(future.result())

        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="stagewright")
        try:
            for job in jobs:
                most = self._workers + AHEAD
                if self._most_at_once is not None:
                    most = min(most, self._most_at_once(job))
                collect(max(0, most - 1))
                busy.add(pool.submit(function, job))
            collect(0)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for future in busy:
                if not future.cancelled() and future.exception() is None:
                    done(future.result())


class Processes:
    """Processes of this machine, for jobs that compute in Python, as far as these are worth it.

    A process takes about one CPU-second to start and to import what jobs need. So the first job
    runs in this process; by the time that jobs have taken here, as many processes are started for
    the rest as get `worth` CPU-seconds of work each. Until that are two, jobs run here. Where there
    are as many long jobs as workers, all of them end one job's time later than side by side.
    """

    WORTH = 2.0
    """CPU-seconds of work of a process: twice as many as it takes to start."""

    def __init__(self, workers: int, worth: float = WORTH) -> None:
        """`workers`: the most processes; they are started anew."""
        self._workers, self._worth = workers, worth

    def run(
        self,
        function: Callable[[Job], Result],
        jobs: Iterable[Job],
        done: Callable[[Result], None],
    ) -> None:
        """As `Executor.run`; function, jobs and results are pickled."""
        waiting = deque(jobs)
        begin, here = time.process_time(), 0
        while waiting:
            count = min(self._workers, len(waiting))
            if self._worth > 0:
                left = (time.process_time() - begin) / max(here, 1) * len(waiting)
                count = min(count, int(left / self._worth))
            if count > 1:
                _spread(count, function, waiting, done)
                return
            done(function(waiting.popleft()))
            here += 1


def _spread(
    count: int,
    function: Callable[[Job], Result],
    jobs: Iterable[Job],
    done: Callable[[Result], None],
) -> None:
    """Run jobs in `count` processes; on return all of them have ended and are joined."""
    context = multiprocessing.get_context("spawn")
    others = {*multiprocessing.active_children()}
    with ProcessPoolExecutor(count, mp_context=context, initializer=_follow_parent) as pool:
        busy = [pool.submit(function, job) for job in jobs]
        try:
            for future in as_completed(busy):
                done(future.result())
        except BaseException:
            for process in {*multiprocessing.active_children()} - others:
                process.terminate()  # a job that is under way would delay the exception
            # The pool's thread reaps the processes, and `with` waits for that thread. A
            # `shutdown(wait=False)` here would let go of it: reaped meanwhile, a process has no
            # exit code for whoever asks next.
            raise


def _follow_parent() -> None:
    """End with the process that started this one, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was started by a pool"
    sentinel = parent.sentinel

    def follow() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)  # a job that is under way has nobody to tell its result

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
        """As `Executor.run`; function, jobs and results are pickled, the function once."""
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
    """A connection to a Ray cluster; UserError where there is no Ray, or none answers.

    `address`: `host:port`, `ray://host:port` or `auto`; None: as the environment says, or a new
    cluster on this machine. A connection that the caller has already made is used and kept.
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
        told = f"address {address}: no Ray cluster answers" if address else "Ray does not start"
        raise UserError(f"{told}: {reason}") from None


def _call(function: Callable[[Job], Result], job: Job) -> Result:
    """A job, on a machine of the cluster."""
    return function(job)


def _cause(error: Any) -> BaseException:
    """The exception of a job on another machine, as that machine raised it."""
    cause = error.cause
    if isinstance(cause, ImportError):
        return UserError(f"engine ray: a machine of the cluster lacks a package: {cause}")
    return cause if isinstance(cause, OSError | UserError) else error
