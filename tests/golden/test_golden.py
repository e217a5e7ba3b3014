"""Results equal those recorded before the refactor: see record.py.

It runs in a separate process: other tests cannot affect it, and without shape checks it takes half the time.
"""

import subprocess
import sys
from pathlib import Path


def test_results_equal_the_recorded_ones() -> None:
    script = Path(__file__).with_name("record.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    different = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
    assert done.returncode == 0, "\n".join([*different, done.stderr[-3000:]])
