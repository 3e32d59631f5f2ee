"""The naive twin of cost model and solver: both passes played out copy by copy, and every choice tried."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from hypothesis import strategies as st

from anabranch.lean.activations.cost_model import ACTIONS, Action, BlockCosts, HostLink

INF = float("inf")
AGAIN = ("recompute", "recompute+offload", "join")
MOVES_INPUT = ("offload", "recompute+offload")


def runs_of(blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> list[list[int]]:
    """Blocks that are recomputed as one, and all others by themselves."""
    runs: list[list[int]] = []
    for number, block in enumerate(blocks):
        if actions[block.name] == "join":
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def moves(blocks: Sequence[BlockCosts], actions: Mapping[str, Action], number: int) -> tuple[int, int]:
    """Bytes that go out when a block begins, and when it ends."""
    block, action = blocks[number], actions[blocks[number].name]
    before = actions[blocks[number - 1].name] if number else None
    begin = block.input_nbytes if action in MOVES_INPUT else 0
    if action in ("keep", "recompute") and before == "offload":
        begin = block.shared_nbytes
    return begin, block.inner_nbytes if action == "offload" else 0


def played_extra_s(blocks: Sequence[BlockCosts], link: HostLink, actions: Mapping[str, Action]) -> float:
    """Forward and backward played out, less what they take by themselves."""
    window_s = INF if link.window_nbytes is None else link.window_nbytes / link.out_nbytes_per_s
    now = free = 0.0
    for number, block in enumerate(blocks):
        begin, end = moves(blocks, actions, number)
        free = max(free, now) + begin / link.out_nbytes_per_s
        now = max(now, free - window_s)  # so that no more than a window waits
        now += block.forward_s
        free = max(free, now) + end / link.out_nbytes_per_s
        now = max(now, free - window_s)
    forward_s = max(now, free)
    return forward_s + played_backward_s(blocks, link, actions) - sum(b.forward_s + b.backward_s for b in blocks)


def played_backward_s(blocks: Sequence[BlockCosts], link: HostLink, actions: Mapping[str, Action]) -> float:
    """Copies come back one after the other, as far ahead of the run that is computed as is allowed."""
    ahead = INF if link.ahead_nbytes is None else link.ahead_nbytes
    runs = list(reversed(runs_of(blocks, actions)))
    total = sum(sum(moves(blocks, actions, run[0])) for run in runs)
    now, here, wanted = 0.0, 0.0, 0.0  # bytes that have come, and that have been asked for
    for run in runs:
        if own := sum(moves(blocks, actions, run[0])):
            wanted += own
            now += max(wanted - here, 0.0) / link.back_nbytes_per_s
            here = max(here, wanted)
        computes_s = sum(
            blocks[number].backward_s + (blocks[number].forward_s if actions[blocks[number].name] in AGAIN else 0.0)
            for number in run
        )
        now += computes_s
        here = max(here, min(here + computes_s * link.back_nbytes_per_s, wanted + ahead, total))
    return now


def played_peak(blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> int:
    """The most that lies on the device: what earlier blocks keep, and all of the run that is differentiated."""
    kept, peak = 0, 0
    for run in runs_of(blocks, actions):
        first, action = blocks[run[0]], actions[blocks[run[0]].name]
        before = actions[blocks[run[0] - 1].name] if run[0] else "recompute"
        stays = {"keep": first.nbytes, "recompute": first.input_nbytes}.get(action, 0)
        extra = first.shared_nbytes if action in MOVES_INPUT and before == "keep" else 0
        so_far = 0
        for number in run:  # from its last block on, but all of it has been recomputed
            block, here = blocks[number], stays if number == run[0] else 0
            so_far += here + (block.nbytes - here) // block.runs
            peak = max(peak, kept + extra + so_far + block.work_nbytes)
        kept += stays + extra
    return peak


def every_choice(blocks: Sequence[BlockCosts]) -> Iterator[dict[str, Action]]:
    """All that make sense."""
    for actions in product(ACTIONS, repeat=len(blocks)):
        fine = all(
            (action in ("keep", "offload") or block.recomputes)
            and (action not in MOVES_INPUT or block.offloads)
            and (action != "join" or (block.joins and number and actions[number - 1] in AGAIN))
            for number, (block, action) in enumerate(zip(blocks, actions, strict=True))
        )
        if fine:
            yield {block.name: action for block, action in zip(blocks, actions, strict=True)}


def least_extra_s(blocks: Sequence[BlockCosts], link: HostLink, budget_nbytes: int) -> float:
    """The best of all choices within the budget; infinite if there is none."""
    within = (actions for actions in every_choice(blocks) if played_peak(blocks, actions) <= budget_nbytes)
    return min((played_extra_s(blocks, link, actions) for actions in within), default=INF)


@st.composite
def chains(draw: st.DrawFn, most: int, all_offload: bool = True) -> list[BlockCosts]:
    """Small models: up to ``most`` blocks."""
    made: list[BlockCosts] = []
    for number in range(draw(st.integers(1, most))):
        given_nbytes, joins = draw(st.integers(0, 20)), number > 0 and draw(st.booleans())
        made.append(
            BlockCosts(
                f"block{number}",
                draw(st.integers(0, 9)) / 4,
                draw(st.integers(0, 9)) / 4,
                draw(st.integers(0, 40)),
                given_nbytes,
                draw(st.integers(0, given_nbytes)) if number else 0,
                joins,
                draw(st.integers(0, 5)) > 0,
                draw(st.integers(0, 20)),
                all_offload or draw(st.booleans()),
                1 if joins else draw(st.sampled_from([1, 1, 3])),
            )
        )
    return made


rates, windows = st.sampled_from([1.0, 8.0, 64.0]), st.none() | st.integers(0, 60)
links = st.builds(HostLink, rates, rates, windows, windows)
