"""The bucket launcher: order, lanes, divisors, marks and the label of each message."""

from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from anabranch import Bucket, Plan
from anabranch.exchange.bucket_launcher import BucketLauncher, EndMarker
from anabranch.exchange.collectives import Collectives
from anabranch.exchange.dense import DenseExchanges
from anabranch.exchange.interface import Group, Steps
from anabranch.exchange.lanes import Lanes, Message
from exchange.fake_exchanges import EighthsExchanges
from ranks import on_ranks

PLAN = Plan((Bucket(("a", "b")), Bucket(("c",), 1, "eighths"), Bucket(("d",))))
NUMELS = dict.fromkeys("abcd", 4)  # which only two-level exchanges look at


class RecordingLane:
    """A lane that runs nothing and keeps what was submitted."""

    def __init__(self, group: Group, number: int, log: list[str]) -> None:
        self.group = group
        self.nodes = None
        self._number = number
        self._log = log

    def submit(self, message: Message) -> Future[torch.Tensor]:
        side = " on a side stream" if message.on_side_stream else ""
        self._log.append(f"lane {self._number}: {message.label}{side}")
        done: Future[torch.Tensor] = Future()
        done.set_result(message.result)
        if message.on_end is not None:
            message.on_end([], True)
        return done

    def close(self, timeout_s: float) -> bool:
        return True


class RecordingExchanges(EighthsExchanges):
    """Keeps the buckets and divisors that it was asked to exchange, of every kind."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def handles(self, kind: str) -> bool:
        return True

    def steps(self, bucket: Bucket, buffer: torch.Tensor, group: Group, divisor: float) -> Steps:
        self._log.append(f"exchange {'+'.join(bucket.names)} of {len(buffer)} / {divisor:g}")
        return iter(())


def launches(rank: int) -> list[str]:
    """Two steps on lanes that only record, the second under another divisor and with marks."""
    log: list[str] = []
    assert dist.group.WORLD is not None
    lanes: Any = [RecordingLane(dist.group.WORLD, number, log) for number in range(2)]
    timed = False

    def mark(index: int) -> EndMarker | None:
        return (lambda works, is_last: log.append(f"bucket {index} ended with {works}, {is_last}")) if timed else None

    launcher = BucketLauncher(
        PLAN, lanes, Collectives(RecordingExchanges(log)), NUMELS, mark, lambda: log.append("before the first")
    )
    for index in range(3):
        launcher.launch(index, torch.zeros(index + 1))
    launcher.divisor = lambda: 3
    timed = True
    launcher.launch(0, torch.zeros(1))
    return log


def test_buckets_are_launched_in_order_each_on_its_lane() -> None:
    for log in on_ranks(launches, 2):
        assert log == [
            "before the first",
            "exchange a+b of 1 / 2",
            "lane 0: bucket 0 of 3 (2 gradients to b, dense on lane 0)",
            "exchange c of 2 / 2",
            "lane 1: bucket 1 of 3 (1 gradients to c, eighths on lane 1) on a side stream",
            "exchange d of 3 / 2",
            "lane 0: bucket 2 of 3 (1 gradients to d, dense on lane 0)",
            "before the first",
            "exchange a+b of 1 / 3",
            "lane 0: bucket 0 of 3 (2 gradients to b, dense on lane 0)",
            "bucket 0 ended with [], True",
        ]


def averages(rank: int) -> dict[str, Any]:
    """Real messages: averages over the world size, and sums over another divisor; all ends are marked."""
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, torch.device("cpu"))
    lanes.grow(PLAN.lanes)
    ended: list[int] = []

    def mark(index: int) -> EndMarker:
        return lambda works, is_last: ended.append(index) if works and is_last else None

    launcher = BucketLauncher(PLAN, lanes, Collectives(EighthsExchanges(), DenseExchanges()), NUMELS, mark)
    results = []
    for divisor in (None, lambda: 1):
        launcher.divisor = divisor
        futures = [launcher.launch(index, torch.full((4,), float(rank + index))) for index in range(len(PLAN))]
        results.append([future.wait()[0].item() for future in futures])
    lanes.close()
    return {"results": results, "ended": sorted(ended)}


def test_futures_hold_the_averages() -> None:
    for answer in on_ranks(averages, 2):
        assert answer["results"] == [[0.5, 1.5, 2.5], [1.0, 3.0, 5.0]]
        assert answer["ended"] == [0, 0, 1, 1, 2, 2]
