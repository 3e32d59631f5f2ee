"""The campaign: draws cases from a seed, runs several at a time, compares with stock DDP, and keeps every verdict."""

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from soak import hostile, links
from soak.case import TAIL_STEPS, Case, draw
from soak.configurations import CONFIGURATIONS
from soak.faults import FAULTS
from soak.judge import BAD, Verdict, judge
from soak.launched import run_launched
from soak.world import RankRecord, Server, run_world

RERUNS = 2  # of a case whose outcome is not good, alone
CONTROLS_OF_FAILURES = 3  # trainings of stock DDP under the same fault: it hangs as it ends now and then


@dataclass(frozen=True)
class Result:
    """A case, its verdict, and, if that is not good, the outcomes of the same case run again, alone."""

    case: Case
    verdict: Verdict
    again: tuple[str, ...] = ()


class Campaign:
    """Runs cases in folders of their own under ``root``; folders of good cases are removed."""

    def __init__(self, server: Server, root: Path) -> None:
        self._server = server
        self._root = root
        self._controls: dict[str, Future[list[RankRecord]]] = {}
        self._lock = threading.Lock()
        self._number = 0

    def run(self, case: Case) -> Verdict:
        """Run one case once."""
        folder = self._folder(case)
        if case.kind.scenario == "resume":
            verdict = self._resumed(case, folder)
        elif case.kind.scenario == "restart":
            verdict = self._restarted(case, folder)
        elif case.kind.scenario == "second start":
            run_world(self._server, case, folder, phase="first")
            _forget_journals(folder)
            verdict = self._judged_beside_ddp(case, run_world(self._server, case, folder, phase="killed"))
        elif case.kind.scenario == "shared cache":
            verdict = self._sharing(case, folder)
        elif case.kind.scenario == "full disk":
            control = self._control(case) if _is_comparable(case) else None
            with hostile.full_disk(folder / "cache"):
                verdict = judge(case, run_world(self._server, case, folder), control)
        elif case.kind.scenario == "launched":
            verdict = run_launched(case, folder)
        elif case.kind.scenario == "links":
            with links.changing(case, folder) as (place, meanwhile):
                records = run_world(self._server, case, folder, meanwhile, place=place)
            verdict = judge(case, records)
        else:
            verdict = self._judged_beside_ddp(case, run_world(self._server, case, folder))
        if case.kind.scenario == "saving" and (problem := hostile.saved_problem(folder)):
            verdict = replace(verdict, outcome="unnamed traceback", why=problem)
        if verdict.good:
            shutil.rmtree(folder, ignore_errors=True)
        return verdict

    def _judged_beside_ddp(self, case: Case, records: Sequence[RankRecord]) -> Verdict:
        """The verdict, with what stock DDP does in this case."""
        control = self._control(case)
        verdict = judge(case, records, control if _is_comparable(case) else None)
        return _beside_ddp(case, verdict, control) if control and case.kind.control == "same fault" else verdict

    def second_look(self, case: Case, verdict: Verdict) -> Result:
        """A case that did not end well, once more and alone; and whether stock DDP does the same."""
        again = tuple(self.run(case).outcome for _ in range(RERUNS))
        same = verdict.outcome in ("hang", "silent divergence", "crash") and case.kind.scenario == "train"
        for _ in range(CONTROLS_OF_FAILURES if same and case.kind.point != "setup" else 0):
            folder = self._folder(case)
            verdict = _beside_ddp(case, verdict, run_world(self._server, case, folder, control=True))
            if verdict.as_ddp:
                break
        return Result(case, verdict, again)

    def _restarted(self, case: Case, folder: Path) -> Verdict:
        """Train until a kill, and once more from the begin with the files that the first start has left."""
        first = judge(case, run_world(self._server, case, folder, phase="killed"))
        _forget_journals(folder)
        control = None if CONFIGURATIONS[case.configuration].lossy else self._trained_by_ddp(_without_fault(case))
        second = judge(case, run_world(self._server, case, folder, phase="restarted"), control)
        return first if not first.good else replace(second, stage=first.stage)

    def _sharing(self, case: Case, folder: Path) -> Verdict:
        """Two trainings of one model at once, which read and write one cache."""
        cache, twin = folder / "cache", folder / "twin"
        cache.mkdir(parents=True)
        twin.mkdir()
        (twin / "cache").symlink_to(cache)
        control = self._control(case) if _is_comparable(case) else None
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(run_world, self._server, case, twin)
            verdict = judge(case, run_world(self._server, case, folder), control)
        if verdict.good:
            verdict = judge(case, other.result(), control)
        problem = hostile.cache_problem(cache)
        return replace(verdict, outcome="unnamed traceback", why=problem) if problem else verdict

    def _resumed(self, case: Case, folder: Path) -> Verdict:
        """Train as a whole, until a kill, and from there on; the ends must be equal bit by bit."""
        whole = run_world(self._server, case, folder / "whole", phase="whole")
        killed = run_world(self._server, case, folder / "killed", phase="killed")
        _forget_journals(folder / "killed")
        resumed = run_world(self._server, case, folder / "killed", phase="resumed")
        verdict = judge(case, killed)
        ends = [record.last("done") for record in (*whole, *resumed)]
        if verdict.good and not all(ends):
            return replace(verdict, outcome="refused", why=f"could not resume: {judge(case, resumed).words}")
        if verdict.good and len({end["digest"] for end in ends if end}) > 1:
            return replace(verdict, outcome="silent divergence", why="the resumed training has other weights")
        return replace(verdict, outcome="trained on") if verdict.good else verdict

    def _control(self, case: Case) -> list[RankRecord] | None:
        """The ranks of stock DDP under no fault, or under the same one; trained once for all cases that share it."""
        if not case.kind.control:
            return None
        return self._trained_by_ddp(case if case.kind.control == "same fault" else _without_fault(case))

    def _trained_by_ddp(self, case: Case) -> list[RankRecord]:
        """The ranks of stock DDP in this case."""
        configuration = CONFIGURATIONS[case.configuration]
        of_ddp = replace(configuration, ours={}, measured=False, lean=None, given_plan=False)
        key = repr((replace(case, configuration=""), of_ddp))
        with self._lock:
            first = key not in self._controls
            promise = self._controls.setdefault(key, Future())
        if first:
            try:
                promise.set_result(run_world(self._server, case, self._folder(case), control=True))
            except BaseException as error:
                promise.set_exception(error)
        return promise.result()

    def _folder(self, case: Case) -> Path:
        with self._lock:
            self._number += 1
            return self._root / f"{self._number:05d}-{str(case).replace('/', '-')}"


def _forget_journals(folder: Path) -> None:
    """Before another start in the same folder."""
    for path in folder.glob("rank-*.jsonl"):
        path.unlink()


def _beside_ddp(case: Case, verdict: Verdict, theirs: Sequence[RankRecord]) -> Verdict:
    """The verdict, which notes whether stock DDP has the same outcome."""
    return replace(verdict, as_ddp=verdict.outcome in BAD and judge(case, theirs).outcome == verdict.outcome)


def _is_comparable(case: Case) -> bool:
    """Whether the weights must be those of stock DDP: Lean leaves out what is not finite, and frozen parameters."""
    own = CONFIGURATIONS[case.configuration]
    return not own.lossy and not (own.lean is not None and _differs_under_lean(case))


def _differs_under_lean(case: Case) -> bool:
    return case.kind.action.startswith("poison") or case.kind.action in ("skip", "backward", "forward")


def _without_fault(case: Case) -> Case:
    """A case of as many steps in which nothing happens: explain() is called."""
    return replace(case, fault="explain-alone", victim=0, moment=case.steps - TAIL_STEPS, ending="close")


def drawn(seed: int, faults: Sequence[str] = ()) -> Iterator[Case]:
    """Cases without end: every fault once per round, in another order and with everything else random."""
    chance = random.Random(seed)
    names = list(faults or FAULTS)
    while True:
        for name in chance.sample(names, len(names)):
            yield draw(FAULTS[name], chance)


def run_campaign(
    campaign: Campaign,
    cases: Iterator[Case],
    at_most: int,
    seconds: float,
    jobs: int,
    on_result: Callable[[Result], None],
) -> list[Result]:
    """Run cases until there are ``at_most``, or the time is over; then look again at those that did not end well."""
    end = time.monotonic() + seconds
    results: list[Result] = []
    doubtful: list[tuple[Case, Verdict]] = []
    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[Verdict], Case] = {}
        waiting = islice(cases, at_most)
        while True:
            while len(running) < jobs and time.monotonic() < end and (case := next(waiting, None)) is not None:
                running[pool.submit(campaign.run, case)] = case
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                case, verdict = running.pop(future), future.result()
                if verdict.good:
                    results.append(Result(case, verdict))
                    on_result(results[-1])
                else:
                    doubtful.append((case, verdict))
                    with suppress(BrokenPipeError):
                        print(f"? {verdict.outcome}: {case}: {verdict.why}", flush=True)
    for case, verdict in doubtful:
        results.append(campaign.second_look(case, verdict))
        on_result(results[-1])
    return results
