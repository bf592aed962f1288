"""The ``envgrad`` command. Its start imports ``main`` alone: help and version load neither torch nor transformers."""
