"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# Time limits are the test run's own, since machines differ.
_ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# A run repeats the one before it; `pytest --hypothesis-profile=search` looks elsewhere every time.
settings.register_profile("fixed", derandomize=True, **_ANY_MACHINE)
settings.register_profile("search", **_ANY_MACHINE)
settings.load_profile("fixed")
