from __future__ import annotations

import sys
from pathlib import Path

# The shape table, the tiny training runs and the ways to start them are shared with the tests that need no GPU.
for folder in ("runtime/kernels", "runtime", "cli"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
