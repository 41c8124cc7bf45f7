from __future__ import annotations

import sys
from pathlib import Path

# The shape table is shared with the tests that run the kernels on the CPU.
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "kernels"))
