"""Data workers and the script that started them: what it does once, and who ends with whom."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from softmoe.data import Transform, TransformConfig
from softmoe.data.loader import needs_script

SCRIPT = """
    import os, signal, sys, time
    from softmoe.data import Loader, Transform, TransformConfig, WorkerDied, open_source

    def main():
        source = open_source("shapes", "train")
        stream = Loader(source, Transform(TransformConfig(32, "pad_crop"), True), 8, workers=2).batches()
        next(stream), next(stream)  # one of each worker
        try:
            print("ready", flush=True)
            while True:
                next(stream)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            stream.close()

    if __name__ == "__main__":
        main()
"""


SLOW_THREADS = """
    import atexit, os, threading, time
    from multiprocessing import queues, resource_tracker, synchronize
    from _multiprocessing import sem_unlink

    feed = queues.Queue._feed

    def feed_and_linger(*arguments):
        feed(*arguments)
        time.sleep(0.1)  # the main thread lets go of the queue meanwhile

    def clean_up(name):
        sem_unlink(name)
        if threading.current_thread() is not threading.main_thread():
            os.write(1, b"slow\\n")  # in one piece: several threads come here at once
            time.sleep(0.3)  # the main thread comes to its end meanwhile
        resource_tracker.unregister(name, "semaphore")

    queues.Queue._feed = staticmethod(feed_and_linger)
    synchronize.SemLock._cleanup = staticmethod(clean_up)
    atexit.register(time.sleep, 0.2)
"""


UNGUARDED = """
    from softmoe.data import Loader, Transform, TransformConfig, open_source

    print("begun")
    transform = Transform(TransformConfig(32, "pad_crop"), True)
    batches = Loader(open_source("shapes?size=32", "train"), transform, 4, workers=1).batches()
    print(tuple(next(batches).images.shape))
"""


def test_a_script_without_a_guard(tmp_path):
    """Workers do not import the script that trains, so its top level runs once."""
    script = tmp_path / "mine.py"
    script.write_text(textwrap.dedent(UNGUARDED))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("begun\n(4, 3, 32, 32)\n", "")


AT_ONCE = """
    import os, signal, sys
    if "forkserver" in " ".join(sys.orig_argv):
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_interrupt_of_a_server_that_starts(tmp_path):
    """Ctrl-C in the first moment of the process that workers are forked from does not reach it."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(AT_ONCE))  # Python runs it before anything else
    script = tmp_path / "mine.py"
    script.write_text(textwrap.dedent(UNGUARDED))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("begun\n(4, 3, 32, 32)\n", "")


def test_data_of_classes_in_the_script():
    """Workers import the script only if the data names something of it."""
    ours = Transform(TransformConfig(8), True)
    assert not needs_script(ours)
    script = type("Mine", (), {"__module__": "__main__"})
    vars(sys.modules["__main__"])["Mine"] = script
    try:
        assert needs_script([ours, script()])
    finally:
        del vars(sys.modules["__main__"])["Mine"]


@pytest.fixture
def running(tmp_path, request):
    """A process of its own group that reads batches with two workers; given when both have sent one."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(getattr(request, "param", "")) + textwrap.dedent(SCRIPT))
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def test_interrupt_is_quiet(running):
    """Ctrl-C reaches the whole process group: the main process ends with its workers, without a word on stderr."""
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (0, "interrupted\n", "")


@pytest.mark.parametrize("running", [SLOW_THREADS], indirect=True)
def test_interrupt_is_quiet_with_slow_threads(running):
    """The end waits for the threads of the queues: one that is cut off in the middle of removing a semaphore would make
    Python's resource tracker complain."""
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    assert out.startswith("interrupted\nslow\n")  # so the threads were the last to hold semaphores


def test_killed_run_leaves_nobody(running):
    """When the main process is killed its workers end too: nobody holds the output open any more."""
    running.kill()
    out, err = running.communicate(timeout=60)  # returns when the last process has closed its end
    assert (running.returncode, out, err) == (-signal.SIGKILL, "", "")
