"""The ``envgrad`` command. Only ``main`` is imported at its start: help and version load neither torch nor transformers."""
