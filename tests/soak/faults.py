"""The faults, as data: what happens, where in a step, and what stock DDP says about it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from soak.configurations import SHARDED

TIMEOUT_S = 3.0  # of the process groups of every case, on an idle machine

Point = Literal["setup", "data", "forward", "loss", "backward", "update", "after", "any", ""]
Control = Literal["", "no fault", "same fault"]
Launcher = Literal["", "torchrun", "anabranch run"]
Scenario = Literal[
    "train",
    "resume",
    "restart",
    "second start",
    "loop",
    "hostile plan",
    "hostile state",
    "hostile cache",
    "saving",
    "shared cache",
    "full disk",
    "links",
    "launched",
]

JOIN = ("join",)
LEAN = ("lean-sgd", "lean-adamw", "lean-oktopk", "lean-oktopk-int8", "lean-bf16-clip")
SPARSE = ("oktopk", "oktopk-bf16-momentum", "lean-oktopk", "lean-oktopk-int8")
CACHED = (
    "default",
    "planner-single",
    "planner-optimal",
    "planner-lanes",
    "oktopk",
    "lean-adamw",
    "batch-norm-measured",
)
NEEDS_ROOT = ("links", "full disk")  # scenarios
SIGNALS = ("interrupt", "terminate", "lose-signal")  # actions after which a rank ends at once
SHARDED_ROWS = (
    "killed",
    "stopped for good",
    "stopped, then continued",
    "raises an exception",
    "slow, within the timeout",
    "slow, past the timeout",
    "exits early",
    "NaN, inf or huge gradients",
    "Ctrl-C or SIGTERM on ranks",
)
NO_STATE_SHIFT = ("join", "accumulate")  # an extra pass means something else under these


@dataclass(frozen=True)
class Fault:
    """One fault.

    row           the class in the table of outcomes
    action        what the victim does; see ``actions.py``, ``mismatches.py``
    point         where in a step; "any": at no fixed point, from another thread; "setup": before it wraps its model
    amount        seconds of a pause, or the factor on a gradient
    too_long      the pause is longer than the group's timeout, by ``amount``
    everyone      on all ranks at once
    control       the training of stock DDP that ours must equal: one without the fault, one with it, or none
    only, never   configurations in which it happens, or does not
    silent        the victim does not come back: it is no survivor, whatever happens
    last_moment   the latest step for it; None for any
    stage         the stage of the tuner for it, if it is meant for one
    launcher      what starts the ranks and receives the signal, if it is not the campaign
    through_torch checkpoints are those of torch.distributed.checkpoint, with ab.CommState
    """

    name: str
    row: str
    action: str = ""
    point: Point = ""
    amount: float = 0.0
    too_long: bool = False
    everyone: bool = False
    control: Control = ""
    only: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    silent: bool = False
    scenario: Scenario = "train"
    last_moment: int | None = None
    stage: str = ""
    launcher: Launcher = ""
    through_torch: bool = False

    def suits(self, configuration: str) -> bool:
        """Whether the fault is meant for this configuration."""
        if configuration in SHARDED and not self._may_be_sharded:
            return False
        return (not self.only or configuration in self.only) and configuration not in self.never

    @property
    def _may_be_sharded(self) -> bool:
        known = self.row in SHARDED_ROWS or self.name in ("other-compress", "other-batch")
        return known and self.scenario == "train" and self.action != "poison-skipped"

    @property
    def signals(self) -> bool:
        """Whether whoever is struck must end at once."""
        return self.action in SIGNALS

    def pause_s(self, timeout_s: float) -> float:
        """How long the victim itself does nothing; 0 if it does not pause, or for good."""
        return self.too_long * timeout_s + self.amount if self.action in ("sleep", "stop") else 0.0


SHORT_S, LATER_S = 0.8, 2.0
CACHED_STEPS = 4  # the first ones of a cached start, in which the cached plan is installed and checked
IN_CACHED_STARTS = (
    "kill-data",
    "kill-forward",
    "kill-backward",
    "kill-any",
    "stop-backward",
    "stop-short-any",
    "raise-forward",
    "raise-backward",
    "slow-loss",
    "late-data",
    "late-backward",
    "exit-loss",
    "abort-any",
    "out-of-inputs",
    "extra-forward",
    "no-backward",
    "nan",
    "nan-everywhere-skipped",
    "frozen-later",
    "other-model",
    "other-compress",
    "other-plan",
    "other-planner",
    "replan-alone",
    "close-alone",
    "hold-everywhere",
    "sigint-one",
    "sigint-all",
    "sigterm-all",
)
POINTS: tuple[Point, ...] = ("data", "forward", "loss", "backward", "update")


def _faults() -> list[Fault]:
    found = [Fault(f"kill-{at}", "killed", "kill", at, silent=True) for at in (*POINTS, "any")]
    for action in ("kill", "stop"):
        row = "stopped for good" if action == "stop" else "killed"
        cached = Fault(f"{action}-cached", row, action, "any", silent=True, scenario="second start", stage="checking")
        found.append(replace(cached, only=CACHED))
    found += [Fault(f"stop-{at}", "stopped for good", "stop", at, silent=True) for at in ("backward", "any")]
    for at in ("forward", "any"):
        found += [
            Fault(f"stop-short-{at}", "stopped, then continued", "stop", at, SHORT_S, control="no fault", never=JOIN),
            Fault(f"stop-long-{at}", "stopped, then continued", "stop", at, LATER_S, too_long=True),
        ]
    found += [Fault(f"raise-{at}", "raises an exception", "raise", at) for at in POINTS]
    found += [Fault("raise-logger", "a logger raises", "raise", "after", control="no fault", never=JOIN)]
    for at in POINTS:
        found.append(Fault(f"slow-{at}", "slow, within the timeout", "sleep", at, SHORT_S, control="no fault"))
    found += [
        Fault(f"late-{at}", "slow, past the timeout", "sleep", at, LATER_S, too_long=True)
        for at in ("data", "backward")
    ]
    found += [Fault(f"exit-{at}", "exits early", "exit", at, silent=True) for at in ("data", "loss")]
    found += [Fault(f"abort-{at}", "exits early", "abort", at, silent=True) for at in ("backward", "any")]
    found += [Fault("out-of-inputs", "runs out of inputs", "return", "data", control="same fault")]
    found += [
        Fault("extra-forward", "an extra pass", "forward", "data", control="same fault", never=NO_STATE_SHIFT),
        Fault("extra-evaluation", "an extra pass", "evaluate", "data", control="same fault", never=JOIN),
        Fault("extra-backward", "an extra pass", "backward", "data", control="same fault", never=NO_STATE_SHIFT),
        Fault("no-backward", "an extra pass", "skip", "loss", control="same fault", never=NO_STATE_SHIFT),
    ]
    for word, factor in (("nan", float("nan")), ("inf", float("inf")), ("huge", 1e38)):
        for everyone in (False, True):
            for skips in ("", "-skipped"):
                name = f"{word}{'-everywhere' if everyone else ''}{skips}"
                row = "NaN, inf or huge gradients"
                found.append(
                    Fault(name, row, f"poison{skips}", "backward", factor, everyone=everyone, control="same fault")
                )
    for what in ("model", "dtype", "shapes", "order"):
        found.append(Fault(f"other-{what}", "another model", what, "setup", last_moment=8))
    for what in ("policy", "compress", "plan", "profile-steps", "planner", "lanes", "wrapping-order"):
        found.append(Fault(f"other-{what}", "other settings", what, "setup", last_moment=8, never=("no-tuning",)))
    found += [
        Fault("other-optimizer", "other settings", "optimizer", "setup", only=LEAN, last_moment=8),
        Fault("frozen-before", "frozen on one rank", "frozen", "setup", last_moment=8),
        Fault("frozen-later", "frozen on one rank", "freeze", "data", control="same fault", never=JOIN),
        Fault(
            "frozen-everywhere",
            "frozen on all ranks",
            "freeze",
            "data",
            everyone=True,
            control="same fault",
            never=JOIN,
        ),
        Fault("other-batch", "harmless differences", "rows", "setup", control="same fault"),
        Fault("other-seed", "harmless differences", "seed", "setup", control="same fault"),
    ]
    for who in ("one", "all"):
        everyone = who == "all"
        for name, action in (("sigint", "interrupt"), ("sigterm", "terminate")):
            row = "Ctrl-C or SIGTERM on ranks"
            found += [Fault(f"{name}-{who}", row, action, "any", everyone=everyone)]
            found += [Fault(f"{name}-{who}-backward", row, action, "backward", everyone=everyone)]
    for launcher in ("torchrun", "anabranch run"):
        for name, action in (("sigint", "interrupt"), ("sigterm", "terminate")):
            name, row = f"{name}-{launcher.replace(' ', '-')}", "Ctrl-C or SIGTERM on the launcher"
            found.append(Fault(name, row, action, "any", launcher=launcher, scenario="launched", last_moment=24))
    for call in ("hold", "replan", "close", "comm_state_dict", "explain"):
        found.append(Fault(f"{call}-alone", "called on one rank", call, "after"))
    for call in ("hold", "replan", "close"):
        found.append(Fault(f"{call}-everywhere", "called on all ranks", call, "after", everyone=True))
    found += [
        Fault("resume", "killed, then resumed", "kill", "any", scenario="resume", silent=True, last_moment=24),
        Fault(
            "resume-dcp",
            "killed, then resumed",
            "kill",
            "any",
            scenario="resume",
            silent=True,
            last_moment=24,
            through_torch=True,
        ),
        Fault("restart", "killed, then started again", "kill", "any", scenario="restart", silent=True, never=JOIN),
        Fault("loop", "wrapped and closed again and again", scenario="loop", last_moment=16),
        Fault("hostile-plan", "damaged files", scenario="hostile plan", last_moment=4),
        Fault("hostile-state", "damaged files", scenario="hostile state", only=SPARSE, last_moment=12),
        Fault("hostile-cache", "damaged files", control="same fault", scenario="hostile cache", only=CACHED),
        Fault("kill-saving", "killed while writing", "kill", scenario="saving", silent=True, last_moment=4),
        *(
            replace(
                fault,
                name=f"cached-{fault.name}",
                row="a cached start",
                scenario="second start",
                only=CACHED,
                last_moment=CACHED_STEPS,
            )
            for fault in found
            if fault.name in IN_CACHED_STARTS
        ),
        Fault(
            "shared-cache",
            "a shared cache",
            "explain",
            "data",
            control="no fault",
            scenario="shared cache",
            only=CACHED,
        ),
        Fault("shared-cache-kill", "a shared cache", "kill", "any", silent=True, scenario="shared cache", only=CACHED),
        Fault(
            "full-disk", "the disk is full", "explain", "data", control="no fault", scenario="full disk", only=CACHED
        ),
        Fault("links-slower", "links change", "rate", scenario="links", last_moment=24),
        Fault("links-down", "links change", "down", scenario="links", last_moment=24),
    ]
    return found


# Faults that the library cannot survive, to test the judge: each must have the outcome of its row.
PLANTED: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("planted-hang", "hang", "hang", "data"),
        Fault("planted-hang-at-exit", "hang", "hang-at-exit", "data"),
        Fault("planted-divergence", "silent divergence", "nudge", "after"),
        Fault("planted-wrong-update", "silent divergence", "nudge", "after", everyone=True, control="no fault"),
        Fault("planted-thread", "leak", "leak-thread", "data"),
        Fault("planted-group", "leak", "leak-group", "data", everyone=True),
        Fault("planted-descriptor", "leak", "leak-descriptor", "data"),
        Fault("planted-crash", "crash", "crash", "data"),
        Fault("planted-traceback", "unnamed traceback", "bare", "data"),
        Fault("planted-thread-traceback", "unnamed traceback", "thread-raises", "data"),
        Fault("planted-lost-signal", "hang", "lose-signal", "data", everyone=True),
        Fault("planted-refusal", "refused", "raise", "data", control="no fault"),
    )
}
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in _faults()}
ROWS: tuple[str, ...] = tuple(dict.fromkeys(fault.row for fault in FAULTS.values()))
