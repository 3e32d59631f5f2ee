"""Rank 0 plans beside the steps, however long that takes; then everyone has its candidates."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

import torch.distributed as dist

from anabranch.comm.agree import Group, agree_on, from_rank_0
from anabranch.plan import Plan

Candidates = list[tuple[str, Plan]]


class BackgroundPlanner:
    """``work`` on rank 0, in a thread that ends with the program. Both methods are collective."""

    def __init__(self, work: Callable[[], Candidates], control: Group) -> None:
        self._control = control
        self._leads = dist.get_rank(control) == 0
        self._thought: Future[Candidates] = Future()
        if self._leads:
            Thread(target=self._think, args=(work,), name="anabranch-planner", daemon=True).start()

    def done(self) -> bool:
        """Whether rank 0 is through."""
        return bool(from_rank_0(bytes([self._thought.done()]), self._control)[0])

    def outcome(self) -> tuple[Candidates, str]:
        """Rank 0's candidates, once it is through, or none and why it failed."""
        failure = self._thought.exception() if self._leads else None
        mine = self._thought.result() if self._leads and failure is None else []
        said = {
            "labels": [label for label, _ in mine],
            "failure": f"{type(failure).__name__}: {failure}" if failure else "",
        }
        heard = json.loads(from_rank_0(json.dumps(said).encode(), self._control))
        labels = heard["labels"]
        plans = [agree_on(Plan, mine[i][1] if self._leads else None, self._control) for i in range(len(labels))]
        return list(zip(labels, plans, strict=True)), heard["failure"]

    def _think(self, work: Callable[[], Candidates]) -> None:
        """A planner's error must not leave the other ranks waiting."""
        try:
            self._thought.set_result(work())
        except BaseException as error:
            self._thought.set_exception(error)
