"""The naive twin of cost model and solver: backward played out run by run, and every choice tried."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from hypothesis import strategies as st

from anabranch.lean.activations.solver import ACTIONS, Action, BlockCosts

INF = float("inf")


def runs_of(blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> list[list[BlockCosts]]:
    """Blocks that are recomputed as one, and all others by themselves."""
    runs: list[list[BlockCosts]] = []
    for block in blocks:
        if actions[block.name] == "join":
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def played_extra_s(blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> float:
    """Backward played out, less what it takes by itself."""
    now_s = 0.0
    for run in reversed(runs_of(blocks, actions)):
        again = actions[run[0].name] == "recompute"
        now_s += sum(block.backward_s + (block.forward_s if again else 0.0) for block in run)
    return now_s - sum(block.backward_s for block in blocks)


def played_peak(blocks: Sequence[BlockCosts], actions: Mapping[str, Action]) -> int:
    """The most that lies on the device: what earlier blocks keep, and all of the run that is differentiated."""
    kept, peak = 0, 0
    for run in runs_of(blocks, actions):
        stays = run[0].nbytes if actions[run[0].name] == "keep" else run[0].input_nbytes
        so_far = 0
        for number, block in enumerate(run):  # from its last block on, but all of it has been recomputed
            here = stays if number == 0 else 0
            so_far += here + (block.nbytes - here) // block.runs
            peak = max(peak, kept + so_far + block.work_nbytes)
        kept += stays
    return peak


def every_choice(blocks: Sequence[BlockCosts]) -> Iterator[dict[str, Action]]:
    """All that make sense."""
    for actions in product(ACTIONS, repeat=len(blocks)):
        fine = all(
            action == "keep"
            or (block.recomputes and (action != "join" or (block.joins and number and actions[number - 1] != "keep")))
            for number, (block, action) in enumerate(zip(blocks, actions, strict=True))
        )
        if fine:
            yield {block.name: action for block, action in zip(blocks, actions, strict=True)}


def least_extra_s(blocks: Sequence[BlockCosts], budget_nbytes: int) -> float:
    """The best of all choices within the budget; infinite if there is none."""
    within = (actions for actions in every_choice(blocks) if played_peak(blocks, actions) <= budget_nbytes)
    return min((played_extra_s(blocks, actions) for actions in within), default=INF)


@st.composite
def chains(draw: st.DrawFn, most: int) -> list[BlockCosts]:
    """Small models: up to ``most`` blocks."""
    made: list[BlockCosts] = []
    for number in range(draw(st.integers(1, most))):
        joins = number > 0 and draw(st.booleans())
        made.append(
            BlockCosts(
                f"block{number}",
                draw(st.integers(0, 9)) / 4,
                draw(st.integers(0, 9)) / 4,
                draw(st.integers(0, 40)),
                draw(st.integers(0, 20)),
                joins,
                draw(st.integers(0, 5)) > 0,
                draw(st.integers(0, 20)),
                1 if joins else draw(st.sampled_from([1, 1, 3])),
            )
        )
    return made
