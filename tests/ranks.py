"""Real ranks for tests: a function on N processes joined by Gloo, with a deadline for all of them together."""

import faulthandler
import functools
import io
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
Case = tuple[Callable[..., Any], *tuple[object, ...]]  # a function, and its arguments after the rank

GROUP_TIMEOUT_S = 45.0  # of the default group, on an idle machine
GRACE_S = 5.0  # for the other ranks, once one has failed
GROUP_TIMEOUT_VARIABLE = "ANABRANCH_TESTS_GROUP_TIMEOUT_S"  # for a rank to know what it was given
MAX_PATIENCE = 5.0  # keeps deadlines below pytest's own

# Ranks are forked from a server that has imported what they need: 0.1 s for two of them, instead of 3 s of CPU each.
# Ranks that live on from call to call would save another 0.06 s a call, and tests would see each other's leftovers.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed",
        "torch._dynamo",
        "pytest",
        "anabranch.parallel",
        "anabranch.lean.parallel",
        "pydantic.type_adapter",
        "numpy.ma",
    ]
)


class RankError(AssertionError):
    """A rank failed, died or did not end in time; the message holds its traceback."""


def patience() -> float:
    """By what factor a deadline is extended here and now: the load per core, from 1 to MAX_PATIENCE."""
    return min(MAX_PATIENCE, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def group_timeout() -> timedelta:
    """On a rank of ``on_ranks``: the timeout of the default group, which is extended on a busy machine."""
    return timedelta(seconds=float(os.environ[GROUP_TIMEOUT_VARIABLE]))


def on_ranks(function: Callable[..., Result], world_size: int, *args: object, timeout_s: float = 60.0) -> list[Result]:
    """What ``function(rank, *args)`` returns on each rank of a fresh process group, in rank order.

    Every call has fresh processes. ``function`` is defined at module level, and returns numbers, texts, tensors, or
    lists and dicts of them. Warnings are errors. No process is left behind, also not one that hangs as it ends.
    ``timeout_s`` is for all ranks together, on an idle machine.
    """
    name = getattr(function, "__name__", "a call")
    return cases_on_ranks({name: (function, *args)}, world_size, timeout_s)[name]


def cases_on_ranks(cases: Mapping[str, Case], world_size: int, timeout_s: float = 60.0) -> dict[str, list[Any]]:
    """What each case returns on each rank, by its name; one launch for all of them, as ``on_ranks``.

    Cases run one after another in the same processes and the same group. A case that patches a module, sets a variable
    of the environment or is to fail has a launch of its own. Messages of failures name the case.
    """
    patient = patience()
    timeout_s, group_timeout_s = timeout_s * patient, float(round(GROUP_TIMEOUT_S * patient))
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="anabranch-ranks-") as folder:
        pairs = [CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            CONTEXT.Process(
                target=_rank,
                args=(dict(cases), rank, world_size, folder, writer, timeout_s, group_timeout_s),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank, (_, writer) in enumerate(pairs)
        ]
        try:
            for process, (_, writer) in zip(processes, pairs, strict=True):
                process.start()
                writer.close()
            answers = _answers([reader for reader, _ in pairs], deadline)
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()) if len(answers) == world_size else 0.0)
            found = [_result(answers, process, rank, folder) for rank, process in enumerate(processes)]
            return {name: [answer[name] for answer in found] for name in cases}
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
            for reader, _ in pairs:
                reader.close()


def _answers(readers: list[Any], deadline: float) -> dict[int, Any]:
    """What each rank sent; a failing rank's answer, and those of ranks that failed in its wake, raise RankError."""
    answers: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = dict(enumerate(readers))
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        ready: list[Any] = connection.wait(list(waiting.values()), left_s)
        for reader in ready:
            rank = readers.index(reader)
            del waiting[rank]
            try:
                kind, value = torch.load(io.BytesIO(reader.recv_bytes()), weights_only=True)
            except EOFError:
                kind, value = "error", "it died without a word"
            if kind == "error":
                errors[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_S * patience())
            else:
                answers[rank] = value
    if errors:
        raise RankError("\n".join(f"rank {rank} failed:\n{text}" for rank, text in errors.items()))
    return answers


def _result(answers: dict[int, Any], process: Any, rank: int, folder: str) -> Any:
    if rank not in answers or process.exitcode != 0:
        stacks = Path(folder, f"stacks-{rank}").read_text()
        when = "did not end in time" if process.exitcode is None else f"ended with {process.exitcode}"
        raise RankError(f"rank {rank} {when}, {'after' if rank in answers else 'before'} its result; stacks:\n{stacks}")
    return answers[rank]


def _rank(
    cases: Mapping[str, Case],
    rank: int,
    world_size: int,
    folder: str,
    writer: Any,
    timeout_s: float,
    group_timeout_s: float,
) -> None:
    """One rank's process."""
    os.environ[GROUP_TIMEOUT_VARIABLE] = str(group_timeout_s)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    _wait_for_plans()
    answers: dict[str, object] = {}
    name = "the rendezvous"
    with Path(folder, f"stacks-{rank}").open("w") as stacks:
        faulthandler.dump_traceback_later(max(1.0, timeout_s - 2.0), file=stacks)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/rendezvous",
                    rank=rank,
                    world_size=world_size,
                    timeout=group_timeout(),
                )
                for name, (function, *args) in cases.items():
                    print(f"In {name}:", file=stacks, flush=True)
                    with warnings.catch_warnings():
                        answers[name] = function(rank, *args)
                    if dist.is_initialized():
                        dist.barrier()
                if dist.is_initialized():
                    dist.destroy_process_group()
            answer: tuple[str, object] = ("result", answers)
        except BaseException:
            answer = ("error", f"in {name}: {traceback.format_exc()}")
        parcel = io.BytesIO()
        torch.save(answer, parcel)
        writer.send_bytes(parcel.getvalue())
        if answer[0] == "error":
            os._exit(1)  # its threads may be waiting for ranks that have gone


def _wait_for_plans() -> None:
    """In this process, planning takes as many steps on a busy machine as on an idle one: the first that asks waits."""
    from anabranch.tuning.candidates import BackgroundPlanner

    done = BackgroundPlanner.done

    @functools.wraps(done)
    def waited(self: BackgroundPlanner) -> bool:
        if self._is_rank_0:
            self._planned.exception()
        return done(self)

    BackgroundPlanner.done = waited  # type: ignore[method-assign]
