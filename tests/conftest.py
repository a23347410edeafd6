"""Settings shared by all tests: reproducible draws, one thread, property tests without a clock."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # so that any test may `import oracle`
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite started in the background inherits it ignored

os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; triton looks when it is first imported

settings.register_profile(
    "softmoe",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("softmoe")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, so that this comes after its list of skips
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say at the end that pages were not opened, and what would open them: a skip in the middle is not read."""
    yield
    without = [r for r in terminalreporter.stats.get("skipped", []) if "no Chromium" in str(r.longrepr)]
    if without:
        count = f"{len(without)} tests open a page in a browser and were not run: no Chromium was found."
        terminalreporter.write_line(f"{count} Install one (apt-get install chromium) and run them again.", yellow=True)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Fixtures of a module or the session run on one thread, as the tests that compare with them do."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, on one thread: no result depends on the tests before it."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A real file system of 1.2 MB in memory, where the system lets us have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", folder], capture_output=True)
    except OSError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
