"""Injector: makes one fault happen on the victim, once, at its moment, and notes it in the journal."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from soak.case import HORIZON, Case
from soak.journal import Journal
from soak.training import Training

POLL_S = 0.0005
ANYWHERE_S = 0.02  # an asynchronous fault comes up to this long after the begin of its step


class InjectedError(Exception):
    """The exception that a fault raises on its victim."""


class Injector:
    """Makes the case's fault happen; on ranks that are no victims, and after it has happened, it does nothing."""

    def __init__(self, case: Case, rank: int, journal: Journal, timeout_s: float) -> None:
        self.case = case
        self._amount = case.kind.pause_s(timeout_s) or case.kind.amount
        self.training: Training | None = None  # known once the model is wrapped
        self._journal = journal
        self._armed = case.kind.point != "setup" and (rank == case.victim or case.kind.everyone)
        self._lock = threading.Lock()

    def watch(self, training: Training) -> None:
        """Start to strike: the model is wrapped."""
        self.training = training
        if not self._armed:
            return
        if self.case.kind.row == "a logger raises" and not training.control:
            training.model.log_to(FailingLogger(self), every_rank=True)
        if self.case.kind.point == "any" and isinstance(self.case.moment, str):
            threading.Thread(target=self._await_stage, args=(self.case.moment,), daemon=True).start()

    def at(self, point: str, step: int) -> object:
        """Strike if the fault is due at this point of this step; returns what its action returned."""
        fault, moment = self.case.kind, self.case.moment
        if not self._armed or self.training is None:
            return None
        due = step == (moment if isinstance(moment, int) else HORIZON)  # a stage that never came: at the horizon
        if fault.point == "any" and point == "data" and due:
            delay_s = random.Random(str(self.case)).random() * ANYWHERE_S
            threading.Timer(delay_s, self.strike).start()
        elif fault.point == point and due and fault.row != "a logger raises":
            return self.strike()
        return None

    def strike(self) -> object:
        """Let the fault happen, once."""
        with self._lock:
            if not self._armed or self.training is None:
                return None
            self._armed = False
        ends = self.case.kind.signals
        self._journal.note("fault", step=self.training.step, stage=self.training.stage(), ends=ends)
        return ACTIONS[self.case.kind.action](self.training, self._amount)

    def _await_stage(self, stage: str) -> None:
        """Strike in the midst of a stage that this rank reaches."""
        assert self.training is not None
        while self._armed:
            if self.training.stage().startswith(stage.replace("-", " ")):
                time.sleep(random.Random(str(self.case)).random() * ANYWHERE_S / 2)
                self.strike()
            time.sleep(POLL_S)


class FailingLogger:
    """A logger that raises in one step."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    def log(self, metrics: Any) -> None:
        """Raise when the step has come."""
        training = self._injector.training
        if training is not None and training.step >= int(self._injector.case.moment):
            self._injector.strike()

    def close(self) -> None:
        """Nothing is held."""


# ------------------------------------------------------------------------------------------------------------- actions


def kill(training: Training, amount: float) -> None:
    """As the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(training: Training, amount: float) -> None:
    """Stop the whole process: for ``amount`` seconds, or, with 0, for good."""
    if amount:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {amount}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt(training: Training, amount: float) -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def terminate(training: Training, amount: float) -> None:
    """As a scheduler does; the program has a handler, which raises SystemExit."""
    os.kill(os.getpid(), signal.SIGTERM)


def raise_error(training: Training, amount: float) -> None:
    """As a bug in the user's program would."""
    raise InjectedError("a bug in the user's program")


def sleep(training: Training, amount: float) -> None:
    """As a slow disk would."""
    time.sleep(amount)


def leave(training: Training, amount: float) -> None:
    """sys.exit() in the middle of a step."""
    sys.exit(0)


def abort(training: Training, amount: float) -> None:
    """The process is gone, without the end of the interpreter."""
    os._exit(0)


def run_out(training: Training, amount: float) -> None:
    """There are no further inputs on this rank."""
    training.out_of_inputs = True


def extra_forward(training: Training, amount: float) -> None:
    """A forward that nobody differentiates."""
    training.call(*training.inputs())


def evaluate(training: Training, amount: float) -> None:
    """A forward under no_grad, in evaluation mode."""
    training.model.eval()
    with torch.no_grad():
        training.call(*training.inputs())
    training.model.train()


def extra_backward(training: Training, amount: float) -> None:
    """A whole forward and backward that the other ranks do not make."""
    training.call(*training.inputs()).square().mean().backward()


def skip_backward(training: Training, amount: float) -> None:
    """A step without its backward."""
    training.skips_backward = True


def poison(training: Training, amount: float) -> float:
    """The factor on a gradient of the middle layer."""
    return amount


def freeze(training: Training, amount: float) -> None:
    """The first layer is not trained any more."""
    next(training.module.parameters()).requires_grad_(False)


# Planted: what a broken library might do.


def hang(training: Training, amount: float) -> None:
    """For ever."""
    time.sleep(1e6)


def lose_signal(training: Training, amount: float) -> None:
    """Ctrl-C, and training goes on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGINT)


def hang_at_exit(training: Training, amount: float) -> None:
    """When the interpreter ends."""
    threading.Thread(target=time.sleep, args=(1e6,)).start()


def nudge(training: Training, amount: float) -> None:
    """Change a weight that nobody else changes."""
    with torch.no_grad():
        next(training.module.parameters()).add_(0.01)


def leak_thread(training: Training, amount: float) -> None:
    """A thread that does not end with the model."""
    threading.Thread(target=time.sleep, args=(600,), name="anabranch-left-over", daemon=True).start()


def leak_group(training: Training, amount: float) -> None:
    """A process group that does not end with the model."""
    dist.new_group(backend="gloo")


def leak_descriptor(training: Training, amount: float) -> None:
    """A file that is not closed."""
    os.open(os.devnull, os.O_RDONLY)


def crash(training: Training, amount: float) -> None:
    """As an assertion in C++ does."""
    os.abort()


def bare(training: Training, amount: float) -> None:
    """An error that names nothing."""
    raise KeyError("x")


def thread_raises(training: Training, amount: float) -> None:
    """A traceback on stderr, by a thread."""
    threading.Thread(target=bare, args=(training, amount), name="a thread").start()


def call(method: str) -> Callable[[Training, float], None]:
    """Call a method of DataParallel, which stock DDP does not have."""

    def called(training: Training, amount: float) -> None:
        if not training.control:
            getattr(training.model, method)()

    return called


ACTIONS: Mapping[str, Callable[[Training, float], object]] = {
    "kill": kill,
    "stop": stop,
    "interrupt": interrupt,
    "terminate": terminate,
    "raise": raise_error,
    "sleep": sleep,
    "exit": leave,
    "abort": abort,
    "return": run_out,
    "forward": extra_forward,
    "evaluate": evaluate,
    "backward": extra_backward,
    "skip": skip_backward,
    "poison": poison,
    "poison-skipped": poison,
    "freeze": freeze,
    "hang": hang,
    "hang-at-exit": hang_at_exit,
    "lose-signal": lose_signal,
    "nudge": nudge,
    "leak-thread": leak_thread,
    "leak-group": leak_group,
    "leak-descriptor": leak_descriptor,
    "crash": crash,
    "bare": bare,
    "thread-raises": thread_raises,
    **{method: call(method) for method in ("hold", "replan", "close", "comm_state_dict", "explain")},
}
