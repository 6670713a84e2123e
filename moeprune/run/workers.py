"""How the groups of a grid's runs are spread: over processes of this machine, or over a Ray cluster.

Each yields (group, errors by run) as groups end. A process or a machine that dies takes only its own group down: its
runs that are not done are recorded as failed, and the same command goes on with them.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.run import done_stages
from moeprune.config.schema import RunConfig
from moeprune.console import say

CONNECT_SECONDS = 5.0

Group = dict[str, RunConfig]
Errors = dict[str, str]  # run -> what went wrong
Work = Callable[[Group, Path, Path], Errors]  # a function of a module: it is sent by its name


def over_processes(
    groups: Sequence[Group], work: Work, directory: Path, shared: Path, *, workers: int
) -> Iterator[tuple[Group, Errors]]:
    """At most `workers` groups at a time, each in a process of its own."""
    pool = ThreadPoolExecutor(workers)
    waiting: dict[Future[Errors], Group] = {}
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    try:
        for group in groups:
            waiting[pool.submit(_in_a_process, group, work, directory, shared, threads)] = group
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _in_a_process(group: Group, work: Work, directory: Path, shared: Path, threads: str) -> Errors:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin, initargs=(threads,)) as pool:
        try:
            return pool.submit(work, group, directory, shared).result()
        except BrokenProcessPool:
            return _lost(group, directory, "its process died; the usual cause is memory, so try fewer --workers")


def _begin(threads: str) -> None:
    """Set the number of threads, before anything imports torch, and end with the parent process.

    A parent that is killed would leave a pool's processes waiting for ever.
    """
    os.environ["OMP_NUM_THREADS"] = threads

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def require_ray(address: str) -> None:
    """Raises InputError where Ray is not installed or nothing listens at HOST:PORT, which Ray tries for minutes."""
    if find_spec("ray") is None:
        raise InputError("--ray: Ray is not installed; pip install 'moeprune[ray]', or use --workers N")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # `local`, `auto`
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def over_ray(
    groups: Sequence[Group], work: Work, directory: Path, shared: Path, *, address: str
) -> Iterator[tuple[Group, Errors]]:
    """A task for each group, on the cluster at `address`, or on one made of this machine for "local".

    A task takes one CPU, and one GPU where the cluster has any and the group's device is not the CPU. All machines see
    this working directory under the same path. Ray tries a task again whose machine died: it goes on run by run.
    Raises InputError when no cluster answers.
    """
    import ray

    _connect(address)
    try:
        resources = ray.cluster_resources()
        say(f"grid: Ray with {resources.get('CPU', 0):.0f} CPUs and {resources.get('GPU', 0):.0f} GPUs")
        task = ray.remote(_on_a_machine)
        places = (os.getcwd(), directory.absolute(), shared.absolute())
        waiting = {}
        for group in groups:
            gpus = int(bool(resources.get("GPU")) and _device(group) != "cpu")
            waiting[task.options(num_gpus=gpus, max_retries=1).remote(group, work, *places)] = group
        while waiting:
            (ended,), _ = ray.wait(list(waiting), num_returns=1)
            group = waiting.pop(ended)
            try:
                errors = ray.get(ended)
            except ray.exceptions.RayError as error:
                errors = _lost(group, directory, f"its Ray task failed ({str(error).strip().splitlines()[-1]})")
            yield group, errors
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing about a run leaves the cluster unasked
    # A task without GPUs hides none; this will be Ray's default.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"logging_level": "ERROR", "configure_logging": True}
    if address == "local":
        options["include_dashboard"] = False
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> InputError:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return InputError(
        f"--ray {address}: no Ray cluster answers there ({why}); give the HOST:PORT that `ray start --head` printed, "
        "or `local`"
    )


def _on_a_machine(group: Group, work: Work, here: str, directory: Path, shared: Path) -> Errors:
    """The group's work, seen from the driver's working directory, so that relative paths of configs mean the same."""
    if not Path(here).is_dir():
        why = f"this machine does not see {here}; start the grid in a folder that all machines share"
        return dict.fromkeys(group, why)
    os.chdir(here)
    return work(group, directory, shared)


def _device(group: Group) -> str:
    return next(iter(group.values())).runtime.device


def _lost(group: Group, directory: Path, why: str) -> Errors:
    """Run -> error, for those that were not done when their process or machine ended."""
    return {name: why for name in group if "report" not in done_stages(directory / name)}
