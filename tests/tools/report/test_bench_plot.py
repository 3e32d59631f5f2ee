"""The picture of a benchmark: every model, its ratios, its prediction, in a file that opens."""

from xml.etree import ElementTree

from benchmarks.bench_plot import bench_plot

from anabranch.tools.report.documents import Benchmark, BenchmarkRow


def example(model: str, *rows: BenchmarkRow) -> Benchmark:
    facts = {"device": "NVIDIA H200", "network": "4 hosts, 25 Gbit/s"}
    return Benchmark(model, 32, "img", 4, rows, 0.08, "", facts)


FULL = example(
    "resnet $50$",
    BenchmarkRow("compute only", (0.05,)),
    BenchmarkRow("DDP", (0.1,), 0.1, 5, 1),
    BenchmarkRow("DDP, 5 MiB", (0.09,), 0.1, 20, 1),
    BenchmarkRow("DDP, one bucket", (0.02,)),  # no size: not among the best sizes, however fast
    BenchmarkRow("DataParallel", (0.08,), 0.085, 12, 2),
)
LEAST = example("bert", BenchmarkRow("DDP", (0.2,)), BenchmarkRow("DataParallel", (0.2,)))


def test_svg_names_models_choices_and_numbers() -> None:
    content = bench_plot([FULL, LEAST])
    assert ElementTree.fromstring(content).tag.endswith("svg")
    text = content.decode()  # matplotlib notes each text beside its outlines
    for words in ("resnet $50$", "sent in 12 messages, 2 at a time", "sent as by DDP", "0.80  (80 ms)", "0.90  (90 ms)",
                  "predicted", "computing alone, nothing sent", "DDP with the best bucket size tried",
                  "4 workers: 4 hosts, 25 Gbit/s, NVIDIA H200"):  # fmt: skip
        assert words in text
    assert "0.20  (20 ms)" not in text
    assert content == bench_plot([FULL, LEAST])


def test_hooks_and_compressions_have_bars_of_their_own() -> None:
    """Also where one model has not run them all."""
    rows = (
        BenchmarkRow("DDP", (0.1,)),
        BenchmarkRow("DDP, fp16 hook", (0.07,)),
        BenchmarkRow("DDP, PowerSGD rank 4", (0.06,)),
        BenchmarkRow("DataParallel", (0.09,), 0.09),
        BenchmarkRow("DataParallel, int8", (0.05,), 0.051),
    )
    text = bench_plot([LEAST, example("gpt2", *rows)]).decode()
    for words in ("DDP, fp16 hook", "DDP, PowerSGD rank 4", "anabranch.DataParallel, int8", "0.70  (70 ms)",
                  "0.60  (60 ms)", "0.50  (50 ms)", "1.00  (200 ms)"):  # fmt: skip
        assert words in text
    assert "best bucket size" not in text


def test_what_only_a_later_model_has_is_in_the_legend() -> None:
    text = bench_plot([LEAST, FULL]).decode()
    for words in ("predicted", "computing alone, nothing sent", "DDP with the best bucket size tried"):
        assert text.count(words) == 1


def test_a_compiled_model_stands_beside_ddp_s_compiled_one() -> None:
    compiled = (BenchmarkRow("DDP, compiled", (0.12,)), BenchmarkRow("DataParallel, compiled", (0.1,), 0.11))
    text = bench_plot([example("bert", *LEAST.rows, *compiled)]).decode()
    for words in ("DDP, compiled", "anabranch.DataParallel, compiled", "0.60  (120 ms)", "0.50  (100 ms)"):
        assert words in text


def test_bars_of_one_colour_differ_in_their_hatching() -> None:
    kinds = ("bf16", "int8", "int4", "auto", "oktopk:0.1", "oktopk:0.01", "oktopk:0.001")
    rows = [*LEAST.rows, *(BenchmarkRow(f"DataParallel, {kind}", (0.1,)) for kind in kinds)]
    assert "<pattern" not in bench_plot([example("bert", *rows[:8])]).decode()
    assert "<pattern" in bench_plot([example("bert", *rows)]).decode()
