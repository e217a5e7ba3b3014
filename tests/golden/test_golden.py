"""What was recorded before the code was rearranged is still what it gives: see record.py.

In a process of its own: nothing that other tests leave behind can move a bit,
and shapes are not checked, which is half the time.
"""

import subprocess
import sys
from pathlib import Path


def test_results_equal_the_recorded_ones() -> None:
    script = Path(__file__).with_name("record.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    different = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
    assert done.returncode == 0, "\n".join([*different, done.stderr[-3000:]])
