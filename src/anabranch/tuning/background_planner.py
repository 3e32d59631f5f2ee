"""Planning on rank 0 in the background, while training continues."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

import torch.distributed as dist

from anabranch.exchange.agree import agree_on, from_rank_0
from anabranch.exchange.contracts import Group
from anabranch.values.plan import Plan

Candidates = list[tuple[str, Plan]]


class BackgroundPlanner:
    """Runs ``plan`` on rank 0, in a daemon thread. Both methods are collective among the ranks of ``control``."""

    def __init__(self, plan: Callable[[], Candidates], control: Group) -> None:
        self._control = control
        self._is_rank_0 = dist.get_rank(control) == 0
        self._planned: Future[Candidates] = Future()
        if self._is_rank_0:
            Thread(target=self._run, args=(plan,), name="anabranch-planner", daemon=True).start()

    def done(self) -> bool:
        """Whether planning has finished."""
        return bool(from_rank_0(bytes([self._planned.done()]), self._control)[0])

    def outcome(self) -> tuple[Candidates, str]:
        """Rank 0's candidates on every rank, once planning has finished; or no candidates, and why planning failed."""
        failure = self._planned.exception() if self._is_rank_0 else None
        found = self._planned.result() if self._is_rank_0 and failure is None else []
        message = {
            "labels": [label for label, _ in found],
            "failure": f"{type(failure).__name__}: {failure}" if failure else "",
        }
        received = json.loads(from_rank_0(json.dumps(message).encode(), self._control))
        labels = received["labels"]
        plans = [agree_on(Plan, found[i][1] if self._is_rank_0 else None, self._control) for i in range(len(labels))]
        return list(zip(labels, plans, strict=True)), received["failure"]

    def _run(self, plan: Callable[[], Candidates]) -> None:
        # An error must reach outcome(): the other ranks wait for it there.
        try:
            self._planned.set_result(plan())
        except BaseException as error:
            self._planned.set_exception(error)
