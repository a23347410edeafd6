import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_killed_and_stopped_runs_end_with_the_same_bits():
    """The short form of tools/kill_test.py: real processes, SIGKILL (also during saves) and SIGTERM."""
    command = [sys.executable, "tools/kill_test.py", "--kills", "3", "--stops", "1", "--steps", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout
    assert "1 stops: identical bit for bit" in done.stdout
