"""What the MG-WFBP papers and their authors' public data say (INFOCOM 2019; TPDS 2021), as read in algorithms.md."""

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.papers.stand_in import (
    BERT_BASE,
    BERT_LARGE,
    DENSENET161,
    DENSENET201,
    INCEPTION_V4,
    RESNET50,
    RESNET152,
    StandIn,
)

SIXTEEN = "16 V100: plot data of the TPDS break-down figures (DreamDDP/scripts/tpds/communication.py), §1.10"
THIRTY_TWO = "32 GPUs: the same group's HKBU-HPML/ddl-benchmarks/results/2020-05-29, §1.10"
SIMULATION = (
    "4 to 2048 GPUs: the papers' per-point figures could not be read; these are a rerun of their simulation on their "
    "public K80 GoogleNet trace, §1.6"
)


class Line(NamedTuple):
    """T(M) = a + b·M as published."""

    start_s: float
    s_per_byte: float


# The fits of the TPDS paper for 16 workers, and the rows of the public code's tables for 32 (§1.11).
LINES_16: Mapping[str, Line] = {"10GbE": Line(9.081e-4, 7.396e-10), "56Gb IB": Line(2.358e-4, 4.059e-10)}
LINES_32: Mapping[str, Line] = {"10GbE": Line(4.043e-3, 8.643e-10), "100Gb IB": Line(4.063e-4, 4.907e-10)}


class Step(NamedTuple):
    """Seconds per iteration of one message per layer, one message in all, and merging by the rule."""

    wfbp: float
    single: float
    mgwfbp: float


class Case(NamedTuple):
    """A model on 16 GPUs: computing time, and a step on either network."""

    model: str
    stand_in: StandIn
    itemsize: int
    compute_s: float
    steps: Mapping[str, Step]


def _case(model: str, trace: StandIn, itemsize: int, compute_s: float, ethernet: Step, infiniband: Step) -> Case:
    return Case(model, trace, itemsize, compute_s, {"10GbE": ethernet, "56Gb IB": infiniband})


CASES_16 = (
    _case("ResNet-152 fp32", RESNET152, 4, 0.8831, Step(1.2334, 1.3601, 1.1261), Step(1.0821, 1.1435, 1.0893)),
    _case("ResNet-152 fp16", RESNET152, 2, 0.3886, Step(0.7571, 0.6363, 0.6297), Step(0.5310, 0.5182, 0.4863)),
    _case("Inception-v4 fp32", INCEPTION_V4, 4, 0.6108, Step(0.9437, 0.9, 0.7806), Step(0.7674, 0.7462, 0.6613)),
    _case("Inception-v4 fp16", INCEPTION_V4, 2, 0.2797, Step(0.5910, 0.4771, 0.4232), Step(0.4302, 0.3732, 0.3638)),
    _case("DenseNet-161 fp32", DENSENET161, 4, 0.4777, Step(0.8324, 0.6826, 0.6280), Step(0.6019, 0.5968, 0.5274)),
    _case("DenseNet-161 fp16", DENSENET161, 2, 0.2530, Step(0.6149, 0.3994, 0.3604), Step(0.4, 0.33, 0.3211)),
    _case("DenseNet-201 fp32", DENSENET201, 4, 0.3609, Step(0.7636, 0.5128, 0.4566), Step(0.5124, 0.4378, 0.4059)),
    _case("DenseNet-201 fp16", DENSENET201, 2, 0.2152, Step(0.6142, 0.4065, 0.3618), Step(0.3977, 0.3544, 0.3313)),
)  # fmt: skip


class Throughput(NamedTuple):
    """Samples per second of 32 GPUs on one network."""

    model: str
    stand_in: StandIn
    batch: int
    alone: float  # samples per second of one GPU
    network: str
    bsp: float
    wfbp: float
    mgwfbp: float
    bytescheduler: float


CASES_32 = (
    Throughput("ResNet-50", RESNET50, 64, 253.1, "10GbE", 4920.8, 5113.2, 6883.6, 4754.3),
    Throughput("ResNet-50", RESNET50, 64, 253.1, "100Gb IB", 7126.5, 7326.6, 7876.5, 4766.4),
    Throughput("ResNet-50", RESNET50, 64, 253.1, "100GbE", 5744.8, 6141.4, 7540.9, 5104.1),
    Throughput("BERT-Base", BERT_BASE, 64, 212.8, "10GbE", 1926.6, 2013.4, 1925.8, 2259.8),
    Throughput("BERT-Base", BERT_BASE, 64, 212.8, "100Gb IB", 4184.4, 4098.7, 4940.1, 4521.3),
    Throughput("BERT-Large", BERT_LARGE, 8, 49.0, "10GbE", 105.1, 102.0, 105.0, 108.8),
    Throughput("BERT-Large", BERT_LARGE, 8, 49.0, "100Gb IB", 375.2, 339.8, 400.2, 326.4),
)

# The simulation's costs, §1.10. Its a is 2Nα, the older form of §1.2, not the ring's 2(N−1)α.
ALPHA_S = 45.25e-6
BETA_S_PER_BYTE = 1.2 / (9 * 2**30 / 8)
GAMMA_S_PER_BYTE = 160 / 64e9
K80_BACKWARD_S = 0.2053
K80_FORWARD_S = 0.1027


def ring(ranks: int) -> Line:
    """What an all-reduce among so many GPUs costs in the papers' simulation."""
    others = (ranks - 1) / ranks
    return Line(2 * ranks * ALPHA_S, 2 * others * BETA_S_PER_BYTE + others * GAMMA_S_PER_BYTE)


class Point(NamedTuple):
    """Milliseconds from the start of backward to the end of communication."""

    wfbp: float
    single: float
    mgwfbp: float
    optimal: float


POINTS: Mapping[int, Point] = {
    4: Point(205.8, 385.8, 205.8, 205.8),
    8: Point(256.9, 416.2, 215.5, 215.2),
    16: Point(318.2, 431.9, 234.3, 234.3),
    32: Point(418.4, 440.8, 260.8, 247.6),
    64: Point(607.5, 447.5, 380.3, 265.8),
    128: Point(980.1, 455.2, 426.7, 291.9),
    256: Point(1722, 467.7, 467.7, 321.5),
    512: Point(3206, 491.3, 491.3, 379.1),
    1024: Point(6171, 537.9, 537.9, 467.7),
    2048: Point(12103, 630.7, 630.7, 612.3),
}
