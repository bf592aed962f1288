"""``python -m envgrad.distributed.configs fsdp2`` prints where that configuration lies."""

from __future__ import annotations

import sys

from envgrad.distributed.configs import config_names, config_path
from envgrad.errors import ConfigurationError

if __name__ == "__main__":
    try:
        print(*([config_path(name) for name in sys.argv[1:]] or config_names()), sep="\n")
    except ConfigurationError as error:
        sys.exit(str(error))
