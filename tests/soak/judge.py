"""The judge: from what the ranks of a case wrote down to the name of its outcome. Pure functions."""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from soak.case import Case
from soak.journal import Event
from soak.world import RankRecord, obligation

Outcome = Literal[
    "clear error", "trained on", "hang", "silent divergence", "unnamed traceback", "leak", "crash", "refused"
]
GOOD: tuple[Outcome, ...] = ("clear error", "trained on")
BAD: tuple[Outcome, ...] = ("hang", "silent divergence", "unnamed traceback", "leak", "crash", "refused")

# Errors that say nothing to a user who did not write the library.
BARE = {
    "KeyError", "TypeError", "AttributeError", "IndexError", "AssertionError", "UnboundLocalError", "NameError",
    "StopIteration", "Empty", "ZeroDivisionError", "OverflowError", "RecursionError", "UnicodeDecodeError",
    "JSONDecodeError", "EOFError", "NotImplementedError",
}  # fmt: skip
# How errors of Gloo and of torch's stores begin: with a place of their source, or with such words.
RAW = re.compile(
    r"\[[^\]\s]*(gloo|\.(cc|cpp|hpp|h):\d+)[^\]]*\]|Gloo \w+ failed|Connection (closed|reset|refused)|Broken pipe"
    r"|(Socket |wait |Application )?time(d )?out|Rank \d+ (failed|successfully)|failed to (recv|send|connect)",
    re.IGNORECASE,
)
# Where errors of messages that DDP itself sends are raised: in a forward those of buffers and of the order of its own
# buckets, and in a backward in which it sends (``ddp_sends_in_backward`` of the error).
DDPS_IN_FORWARD = re.compile(r"distributed\.py:\d+ in (_pre_forward|_distributed_broadcast_coalesced)")
IN_BACKWARD = re.compile(r"graph\.py:\d+ in _engine_run_backward")
BY_THREADS = ("Exception in thread", "Exception ignored in", "Fatal Python error", "terminate called")
RELATIVE, ABSOLUTE = 2e-3, 2e-4  # sums in another order, over some fifty steps


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case.

    why        what was seen, for an outcome that is not good
    stage      the tuner's stage when the fault struck; "-" if it never did
    end_s      seconds from the fault, or a survivor's last own step, to the end of the slowest survivor
    over_s     how much of that was more than the group's timeout and the victim's own pause
    as_ddp     stock DDP has the same outcome under the same fault
    raw        survivors whose error is Gloo's own, without a word of ours: where each was raised. It is as under DDP
               where DDP's own buckets are in force; where a plan or a cached choice is, it is an unnamed traceback
    words      what each survivor raised
    """

    outcome: Outcome
    why: str = ""
    stage: str = "-"
    end_s: float = 0.0
    over_s: float = 0.0
    as_ddp: bool = False
    raw: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether there is nothing to mend."""
        return self.outcome in GOOD or self.as_ddp


def judge(case: Case, records: Sequence[RankRecord], control: Sequence[RankRecord] | None = None) -> Verdict:
    """Name the outcome of a case; ``control``: the ranks of stock DDP to compare with, if there are any."""
    survivors = _survivors(case, records)
    end_s = max((_end_s(rank, records) for rank in survivors), default=0.0)
    timeout_s = max((event.get("timeout_s", 0.0) for record in records if (event := record.last("begun"))), default=0.0)
    errors = [error for rank in survivors if (error := records[rank].last("error"))]
    return replace(
        _verdict(case, survivors, records, control),
        stage=_stage(records),
        end_s=end_s,
        over_s=max(0.0, end_s - timeout_s - case.kind.pause_s(timeout_s)),
        raw=tuple(error["trace"] for error in errors if RAW.match(error["words"])),
        words=tuple(f"{error['kind']}: {error['words']}" for error in errors),
    )


def _verdict(
    case: Case, survivors: Sequence[int], records: Sequence[RankRecord], control: Sequence[RankRecord] | None
) -> Verdict:
    problems: tuple[tuple[Outcome, str], ...] = (
        ("crash", _crash(case, records)),
        ("hang", _hang(survivors, records)),
        ("silent divergence", _divergence(survivors, records, control)),
        ("unnamed traceback", _unnamed(case, survivors, records)),
        ("refused", _refused(survivors, records, control)),
        ("leak", _leak(survivors, records)),
    )
    for outcome, why in problems:
        if why:
            return Verdict(outcome, why)
    return Verdict("trained on" if all(records[rank].last("done") for rank in survivors) else "clear error")


def _survivors(case: Case, records: Sequence[RankRecord]) -> list[int]:
    """The ranks that must end by themselves: all, without a victim that was to vanish."""
    struck = records[case.victim].last("fault") is not None
    return [rank for rank in range(case.ranks) if not (case.kind.silent and struck and rank == case.victim)]


def _stage(records: Sequence[RankRecord]) -> str:
    """The first two words of the stage at the fault, without what follows a colon or comma."""
    struck = [event for record in records if (event := record.last("fault"))]
    if not struck:
        return "-"
    stage = str(struck[0]["stage"])
    if stage.startswith("No plan"):
        return "no tuning"
    if stage.startswith("profiling again"):
        return "profiling again"
    return re.split(r"[:,.]", stage)[0].split()[0] if stage else "under DDP"


def _end_s(rank: int, records: Sequence[RankRecord]) -> float:
    since = obligation(rank, [record.events for record in records])
    return max(0.0, records[rank].ended - since) if since is not None else 0.0


def _error(record: RankRecord) -> str:
    error = record.last("error")
    return f"{error['kind']}: {error['words']}" if error else ""


def _crash(case: Case, records: Sequence[RankRecord]) -> str:
    for rank, record in enumerate(records):
        by_design = case.kind.silent and rank == case.victim
        if (error := record.last("error")) and error["kind"] in (codes := _codes_of_signals(case, record)):
            if record.code not in (None, codes[error["kind"]]):
                return f"rank {rank} ended with {record.code} after {error['kind']}: {_last_line(record.stderr)}"
            continue
        if record.code is not None and record.code < 0 and not by_design:
            return f"rank {rank} was ended by signal {-record.code}: {_last_line(record.stderr)}"
    return ""


def _codes_of_signals(case: Case, record: RankRecord) -> dict[str, int]:
    """With which exit code a rank that received a signal ends, by what the signal's handler raised."""
    struck = record.last("fault")
    if struck is None or not struck.get("ends"):
        return {}
    raises = case.ending == "raise"
    return {
        "KeyboardInterrupt": -signal.SIGINT if raises else 0,
        "SystemExit": 128 + signal.SIGTERM if raises else 0,
    }


def _hang(survivors: Sequence[int], records: Sequence[RankRecord]) -> str:
    for rank in survivors:
        if records[rank].code is None:
            after = records[rank].events[-1]["what"] if records[rank].events else "its fork"
            return f"rank {rank} has not ended after {records[rank].hung_s:.1f} s; its last word was {after!r}"
    return ""


def _divergence(survivors: Sequence[int], records: Sequence[RankRecord], control: Sequence[RankRecord] | None) -> str:
    """Weights of one step that differ between ranks, or weights in the end that differ from stock DDP's."""
    digests: dict[tuple[object, int], dict[str, int]] = {}
    for rank in survivors:
        for event in records[rank].events:
            if event["what"] in ("step", "done") and event.get("digest"):
                at = event.get("step", "the last"), event.get("part", 0)
                digests.setdefault(at, {}).setdefault(event["digest"], rank)
    apart = next((at for at, found in digests.items() if len(found) > 1), None)
    if apart is not None and _trained_past(apart[0], survivors, records):
        return f"after step {apart[0]} the weights of ranks {sorted(digests[apart].values())} differ"
    ends = [end for rank in survivors if (end := records[rank].last("done"))]
    expected = control[0].last("done") if control and all(record.last("done") for record in control) else None
    if ends and expected is not None and not close(ends[0]["weights"], expected["weights"]):
        return "the ranks agree, and their weights are not those of stock DDP"
    return ""


def _trained_past(step: object, survivors: Sequence[int], records: Sequence[RankRecord]) -> bool:
    """Whether some rank trained on after this step; if none did, the difference was not silent."""
    if not isinstance(step, int):
        return True
    later = [event for rank in survivors for event in records[rank].events if event.get("step", -1) > step]
    return bool(later) or any(records[rank].last("done") for rank in survivors)


def close(found: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether two lists of weights are equal up to rounding, of the largest too; NaN equals NaN."""
    tolerance = ABSOLUTE * max((abs(weight) for weight in expected if math.isfinite(weight)), default=1.0)
    return len(found) == len(expected) and all(
        a == b
        or (math.isnan(a) and math.isnan(b))
        or math.isclose(a, b, rel_tol=RELATIVE, abs_tol=max(ABSOLUTE, tolerance))
        for a, b in zip(found, expected, strict=True)
    )


def _leak(survivors: Sequence[int], records: Sequence[RankRecord]) -> str:
    """Threads, groups or descriptors that are there after close() and were not before, or that grow in a loop.

    An error holds the frames it came through, and with them connections, until the closed wrapper is dropped.
    """
    for rank in survivors:
        failed = records[rank].last("error") is not None
        for when in ("closed, referenced", "closed, dropped"):
            left = records[rank].last(when) or {"threads": [], "groups": 0, "fds": 0}
            fds = 0 if failed and when == "closed, referenced" else left["fds"]
            if left["threads"] or left["groups"] > 0 or fds > 0:
                return f"rank {rank} ({when}): threads {left['threads']}, {left['groups']} groups, {fds} descriptors"
        rounds = [event for event in records[rank].events if event["what"] == "round"]
        if len(rounds) > 2:
            second, last = rounds[1], rounds[-1]
            grown = {name: last[name] - second[name] for name in ("groups", "fds", "tensors")}
            if last["threads"] or any(count > 0 for count in grown.values()):
                return f"rank {rank}, after {len(rounds)} rounds: threads {last['threads']}, growth {grown}"
    return ""


def _unnamed(case: Case, survivors: Sequence[int], records: Sequence[RankRecord]) -> str:
    for rank in survivors:
        record, error = records[rank], records[rank].last("error")
        by_signal = error is not None and error["kind"] in _codes_of_signals(case, record)
        if error and not by_signal and (problem := nameless(error)):
            return f"rank {rank} {problem}"
        for sign in BY_THREADS:
            if sign in record.stderr:
                line = next(line for line in record.stderr.splitlines() if sign in line)
                return f"rank {rank} printed {line[:160]!r}: {_last_line(record.stderr)}"
        if not error and not record.last("done") and record.code is not None:
            return f"rank {rank} ended with {record.code} and said nothing: {_last_line(record.stderr)}"
    return ""


def nameless(error: Event) -> str:
    """What is wrong with the words of an error; empty if they say enough to a user."""
    if error["kind"] in BARE or not error["words"].strip():
        return f"raised {error['kind']}: {error['words'][:120]!r} at {error['trace']}"
    if error.get("in_force") and RAW.match(error["words"]) and not _is_ddps(error):
        return f"raised Gloo's own {error['words'][:160]!r} at {error['trace']}, {error['in_force']}"
    return ""


def _is_ddps(error: Event) -> bool:
    """Whether a message of DDP's own failed, or of another part of torch's."""
    if error.get("caller") == "checkpoint":  # torch.distributed.checkpoint's own
        return True
    if IN_BACKWARD.fullmatch(error["trace"]):
        return bool(error.get("ddp_sends_in_backward"))
    return bool(DDPS_IN_FORWARD.fullmatch(error["trace"]))


def _refused(survivors: Sequence[int], records: Sequence[RankRecord], control: Sequence[RankRecord] | None) -> str:
    """An error where stock DDP trains on."""
    if not control or not all(record.last("done") for record in control):
        return ""
    for rank in survivors:
        if not records[rank].last("done"):
            return f"stock DDP trains on, and rank {rank} raised {_error(records[rank])[:300]}"
    return ""


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing on stderr"
