"""Makes `tests/ranks.py` importable from every folder of tests, and Ctrl-C mean what it means in a terminal."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# Where the tests run in the background of a script, SIGINT is ignored, and processes that a test starts inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
