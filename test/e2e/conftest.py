"""Fixtures: run folders that survive nothing, brokers that end with their module."""

import fcntl
import os
import pathlib
import subprocess

import pytest

from stream_s3_e2e.broker import TOP, Broker, run
from stream_s3_e2e.s3 import S3Test

CACHE = pathlib.Path(
    os.environ.get("STREAM_S3_CACHE")
    or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "rabbitmq-stream-s3"
)
# As scripts/lib/host.sh names this checkout, so that `make clean` finds what is ours.
KEY = subprocess.run(["cksum"], input=str(TOP).encode(), stdout=subprocess.PIPE, check=True).stdout.split()[0].decode()


# What takes minutes begins first, so that two workers end at about the same time.
LONG = [
    "test_outage", "test_kill", "test_bad_input", "test_cluster_changes", "test_cluster_faults", "test_lost_tail",
    "test_attach", "test_lost_disk_cluster", "test_inert",
]


def pytest_collection_modifyitems(items):
    """Files that take long come first; tests of a file keep their order."""
    items.sort(key=lambda item: LONG.index(item.module.__name__) if item.module.__name__ in LONG else len(LONG))


def run_folder(name):
    """A fresh run folder of this checkout, and its lock; what a cut-off run left in it is ended first.

    A folder whose lock is held belongs to a run that goes on beside this one: then the next one is taken.
    """
    (CACHE / "run").mkdir(parents=True, exist_ok=True)
    for number in range(1, 20):
        folder = CACHE / "run" / f"e2e-{KEY}-{name}-{number}"
        lock = open(f"{folder}.lock", "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        if folder.exists():
            run(TOP / "scripts" / "node", "--dir", folder, "wipe", "--all")
        folder.mkdir(parents=True)
        return folder, lock
    raise RuntimeError(f"twenty runs of {name} at once")


@pytest.fixture(scope="module")
def run_dir(request):
    """The run folder of this test module; removed unless the module failed or KEEP is set."""
    folder, lock = run_folder(request.module.__name__.removeprefix("test_"))
    failed_before = request.session.testsfailed
    yield folder
    run(TOP / "scripts" / "node", "--dir", folder, "kill", "--all")
    if request.session.testsfailed == failed_before and not os.environ.get("KEEP"):
        run(TOP / "scripts" / "node", "--dir", folder, "wipe", "--all")
    lock.close()


@pytest.fixture(scope="module")
def s3():
    """An S3 of this module's own, with a fault plan and a log of requests."""
    with S3Test() as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test of a cluster that fails shows what the nodes logged while it ran."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if hasattr(cluster, "log_window"):
        if report.failed:
            report.sections.append(("logs of the nodes", cluster.log_window()))
        if call.when == "teardown":
            cluster.mark_logs()
    return report


@pytest.fixture(scope="module")
def stock_broker(run_dir):
    """A broker without the plugin."""
    return Broker(run_dir, "stock1").start()


@pytest.fixture
def stream_name(request):
    """A stream name of this test's own."""
    return request.node.name.replace("[", "-").replace("]", "").replace("_", "-")
