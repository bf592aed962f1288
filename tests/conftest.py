"""For all tests: how property tests are run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Timings decide no test: an example may take as long as a busy machine needs.
settings.register_profile("envgrad", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("envgrad")
