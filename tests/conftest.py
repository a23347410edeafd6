"""Settings shared by all tests: reproducible draws, one thread, property tests without a clock."""

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # so that any test may `import oracle`
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite started in the background inherits it ignored

settings.register_profile(
    "softmoe",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("softmoe")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, on one thread: no result depends on the tests before it."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
