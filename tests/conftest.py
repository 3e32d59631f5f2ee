"""How every test runs: hypothesis repeats the same examples on every run, without a clock."""

import os

from hypothesis import HealthCheck, settings

# Before torch is imported. The tensors of tests are small: a second thread only makes the first one wait for it.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
