from __future__ import annotations

import sys
from pathlib import Path

# the tests of this folder share small models and sessions
sys.path.insert(0, str(Path(__file__).parent))
