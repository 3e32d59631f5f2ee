"""What a choice for activations is made from: a model's blocks in the order of forward, and the link to the host."""

from dataclasses import dataclass

from anabranch.checks import check_nbytes, check_positive, check_seconds


@dataclass(frozen=True)
class Block:
    """A part of a model that is kept, offloaded or recomputed as one, in the order of forward.

    forward_s, backward_s   what it computes for, without any recomputation
    inner_nbytes            what autograd saves in it and nobody else needs
    input_nbytes            what it is given, which recomputation starts from
    shared_nbytes           the part of its input that the block before has saved as well
    work_nbytes             gradients of activations that come and go while it is differentiated
    joins                   whether it can be recomputed in one run with the block before, needing no input of its own
    recomputes              whether it can be recomputed at all
    offloads                whether anything of it can be offloaded
    runs                    how often it runs, each time differentiated by itself; bytes and seconds are of all runs
    """

    name: str
    forward_s: float
    backward_s: float
    inner_nbytes: int
    input_nbytes: int
    shared_nbytes: int = 0
    joins: bool = False
    recomputes: bool = True
    work_nbytes: int = 0
    offloads: bool = True
    runs: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes and times that cannot be."""
        check_seconds(f"forward_s of block {self.name}", self.forward_s)
        check_seconds(f"backward_s of block {self.name}", self.backward_s)
        for what in ("inner_nbytes", "input_nbytes", "shared_nbytes", "work_nbytes"):
            check_nbytes(f"{what} of block {self.name}", getattr(self, what))
        if self.shared_nbytes > self.input_nbytes:
            raise ValueError(
                f"block {self.name} shares {self.shared_nbytes} bytes of an input of {self.input_nbytes}: "
                "expected a part of it"
            )

    @property
    def nbytes(self) -> int:
        """All that autograd has saved in it."""
        return self.inner_nbytes + self.input_nbytes

    @property
    def once_nbytes(self) -> int:
        """Of one run."""
        return self.nbytes // self.runs


@dataclass(frozen=True)
class HostLink:
    """How fast bytes go from the device to the host's pinned memory and back, both at once.

    window_nbytes   how much may wait for its copy out before computation waits; None: all
    ahead_nbytes    how much may be back before it is needed; None: all
    """

    out_nbytes_per_s: float
    back_nbytes_per_s: float
    window_nbytes: int | None = None
    ahead_nbytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse a link that does not move."""
        check_positive("out_nbytes_per_s", self.out_nbytes_per_s)
        check_positive("back_nbytes_per_s", self.back_nbytes_per_s)

    @property
    def window_s(self) -> float:
        """How far copies out may be behind."""
        return float("inf") if self.window_nbytes is None else self.window_nbytes / self.out_nbytes_per_s

    @property
    def ahead_s(self) -> float:
        """How far copies back may be ahead."""
        return float("inf") if self.ahead_nbytes is None else self.ahead_nbytes / self.back_nbytes_per_s
