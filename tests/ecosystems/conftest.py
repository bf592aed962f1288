"""The suites of other ecosystems' packages."""

collect_ignore = ["openenv_echo.py"]
"""servers: imported by the Python that has their packages, never here"""
