"""Case: one fault in one training, and the text that names it."""

import random
from dataclasses import dataclass
from typing import Literal, get_args

from soak.configurations import CONFIGURATIONS, TWO_BY_TWO
from soak.faults import FAULTS, PLANTED, Fault

Ending = Literal["raise", "close", "destroy", "exit"]
ENDINGS: tuple[Ending, ...] = get_args(Ending)
WORLDS = (2, 2, 2, 3, 3, 4)  # as often as they are drawn
HORIZON = 44  # steps: a whole search of the tuner with short trials, and the begin of the next one
TAIL_STEPS = 6  # of training after the fault
ENDLESS_STEPS = 1_000_000  # after a signal, which ends training if it is not lost
STAGES = ("settling", "profiling", "measuring", "planning", "trying", "running", "profiling-again")


@dataclass(frozen=True)
class Case:
    """One fault in one training.

    moment   the step of the fault, from 0 on; or the begin of a stage of the tuner, for faults that come at any time
    ending   how a rank's program ends after training or an error: the error is raised ("raise"), the model is closed
             and the group destroyed ("close"), only the group is destroyed ("destroy"), nothing of that ("exit")
    """

    fault: str
    configuration: str
    ranks: int
    victim: int
    moment: int | str
    ending: Ending

    def __str__(self) -> str:
        return f"{self.fault}/{self.configuration}/{self.ranks}/{self.victim}/{self.moment}/{self.ending}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case that ``str(case)`` named; ValueError says what is wrong with the text."""
        parts = text.split("/")
        if len(parts) != 6:
            raise ValueError(f"case {text!r}: expected fault/configuration/ranks/victim/moment/ending")
        fault, configuration, ranks, victim, moment, ending = parts
        for what, value, known in (
            ("fault", fault, [*FAULTS, *PLANTED]),
            ("configuration", configuration, list(CONFIGURATIONS)),
            ("ending", ending, list(ENDINGS)),
        ):
            if value not in known:
                raise ValueError(f"case {text!r}: {what} is {value!r}, expected one of {', '.join(known)}")
        step = int(moment) if moment.isdigit() else moment
        return cls(fault, configuration, int(ranks), int(victim), step, ending)  # type: ignore[arg-type]

    @property
    def kind(self) -> Fault:
        """The fault itself."""
        return FAULTS.get(self.fault) or PLANTED[self.fault]

    @property
    def steps(self) -> int:
        """How many steps each rank makes if nothing stops it."""
        tail = ENDLESS_STEPS if self.kind.signals else TAIL_STEPS
        return (self.moment if isinstance(self.moment, int) else HORIZON) + tail


def draw(fault: Fault, chance: random.Random) -> Case:
    """A case of this fault; everything else is random."""
    configurations = [name for name in CONFIGURATIONS if fault.suits(name)]
    configuration = chance.choice(configurations)
    ranks = 4 if configuration in TWO_BY_TWO else chance.choice(WORLDS)
    moment: int | str = chance.randrange(HORIZON)
    if fault.point == "any" and chance.random() < 0.5:
        moment = chance.choice(STAGES)
    if fault.stage:
        moment = fault.stage
    elif fault.last_moment is not None:
        moment = chance.randrange(fault.last_moment + 1)
    return Case(fault.name, configuration, ranks, chance.randrange(ranks), moment, chance.choice(ENDINGS))
