"""Torch's own DDP tests, run under DDP and under DataParallel: see ``__main__``.

Torch's test modules import ``expecttest``, which the torch wheel does not bring. None of the tests that are run here
compares with an expected text, so where it is not installed, the name of its base class is enough.
"""

import importlib.util
import sys
import types
import unittest

if importlib.util.find_spec("expecttest") is None:
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in
