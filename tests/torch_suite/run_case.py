"""One test in one process: its outcome goes to a pipe, and everything that it and its ranks say into a file."""

import os
import unittest
import warnings
from multiprocessing.connection import Connection

import torch

from torch_suite import cases, gpu_on_cpu, suite, wrappers
from torch_suite.suite import FAILED, PASSED, SKIPPED


def run(name: str, mode: str, log: str, writer: Connection) -> None:
    """Send (outcome, message) of a test, in a session of its own so that its ranks can be ended with it."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    warnings.simplefilter("default")
    wrappers.put_in_place_of_ddp(mode)
    if suite.of_torch(name):  # our own tests ask for no GPU
        gpu_on_cpu.pretend()
    result = unittest.TestResult()
    cases.case(name).run(result)
    if result.skipped:
        answer = (SKIPPED, result.skipped[0][1])
    elif result.wasSuccessful():
        answer = (PASSED, "")
    else:
        answer = (FAILED, (result.failures + result.errors)[0][1])
    writer.send(answer)
    writer.close()
    os._exit(0)
