"""The page of a report: one HTML file with words, numbers, style, script and plotly.js in it.

Its templates escape every value. Nothing of a file can run and nothing is fetched: scripts are allowed by their hashes
alone, so that even a mistake in escaping would show a tag and not obey it.
"""

import base64
import gzip
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from statistics import median

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from anabranch.tools.report import benchmark, comparison, demo, formatting, memory, scaling, steps, training
from anabranch.tools.report.documents import BASELINE, LEAST_GAIN, OURS, Benchmark
from anabranch.tools.report.formatting import factor, plain, seconds
from anabranch.tools.report.runs import Runs, file_table
from anabranch.values.extras import require
from anabranch.values.plan import Bucket
from anabranch.values.version import __version__

SCRIPTS = ("theme.js", "tables.js", "charts.js")
FEWEST_STEPS = 3  # whose median says something
FILTERS = ("seconds", "percent", "signed_percent", "factor", "count", "shortened")  # of formatting
CHARTS_AND_TABLES = (
    benchmark.benchmark_chart, benchmark.benchmark_table, benchmark.remarks, comparison.comparison_tables,
    demo.compressed, demo.demo_table, demo.dense_plan, demo.exposed_share, demo.fast_links, demo.gain, demo.is_limited,
    demo.loss_chart, demo.network_limit, file_table, memory.memory_chart, memory.memory_tables, scaling.network_chart,
    scaling.scaling_charts, steps.bucket_table, steps.plan_table, steps.step_chart, training.stage_table,
    training.training_chart,
)  # fmt: skip


def report_page(title: str, runs: Runs, predicted: Sequence[steps.Predicted] = ()) -> str:
    """The page of what was read; ``predicted`` are steps that the caller simulated."""
    pages = templates()
    script = "\n".join(_asset(pages, name) for name in SCRIPTS)
    library, packed = _plotly()
    return pages.get_template("page.html").render(
        title=title,
        runs=runs,
        steps=steps.step_views(runs, predicted),
        headline=headline(runs),
        date=f"{datetime.now(UTC):%d %B %Y}",
        version=__version__,
        policy=_policy(script, library),
        style=Markup(_asset(pages, "style.css")),
        script=Markup(script),
        plotly=packed,
    )


@cache
def templates() -> Environment:
    """Templates that escape values, control characters in them too; JSON in them can end no script element."""
    pages = Environment(
        loader=PackageLoader("anabranch.tools.report", "assets"),
        autoescape=True,
        finalize=lambda value: plain(value) if type(value) is str else value,  # markup is a subclass of str
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    pages.filters |= {name: getattr(formatting, name) for name in FILTERS}
    pages.filters |= {"median": median, "buckets_in_order": buckets_in_order}
    pages.globals |= {function.__name__: function for function in CHARTS_AND_TABLES}
    pages.globals["max_networks"] = scaling.MAX_NETWORKS
    return pages


def _asset(pages: Environment, name: str) -> str:
    assert pages.loader is not None
    return pages.loader.get_source(pages, name)[0]


@cache
def _plotly() -> tuple[str, str]:
    """plotly.js, and the same packed: three quarters of it are air."""
    require("plotly", "report", "anabranch report")
    from plotly.offline import get_plotlyjs

    library: str = get_plotlyjs()
    return library, base64.b64encode(gzip.compress(library.encode(), 9, mtime=0)).decode()


def _policy(*scripts: str) -> str:
    """A browser that keeps to this runs these scripts and no other, and talks to nobody."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def buckets_in_order(view: steps.StepView) -> tuple[Bucket, ...]:
    """The buckets of a step, as a plan lists them."""
    return tuple(view.buckets.values())


def headline(runs: Runs) -> str:
    """The first of the run's measurements in a sentence: how much was gained, or that nothing was; else empty."""
    said = [demo.headline(found) for _, found in runs.demos]
    said += [_benchmark_gain(found) for _, bench in runs.benches for found in bench.benchmarks]
    said += [_training_gain(run) for run in runs.trainings]
    return next(filter(None, said), "")


def _benchmark_gain(found: Benchmark) -> str:
    if OURS not in {row.name for row in found.rows}:
        return ""
    row, base = found.row(OURS), found.row(BASELINE)
    times = f"{seconds(row.step_s)} a step, DDP {seconds(base.step_s)}"
    if found.is_faster(row):
        return f"{found.model}: {row.name} is {factor(1 / found.ratio_to_ddp(row))} as fast as DDP ({times})."
    return f"{found.model}: {row.name} is no faster than DDP beyond the noise ({times})."


def _training_gain(run: training.Training) -> str:
    """The layout in force at the end against DDP's own buckets in the same training; empty where it is too short."""
    timed = [line for line in run.lines if line.measured_s is not None]
    if len(timed) < FEWEST_STEPS:
        return ""
    last = timed[-1].plan
    own = [line.measured_s or 0.0 for line in timed if line.plan is None]
    kept = [line.measured_s or 0.0 for line in timed if line.plan == last]
    if last is None:
        return f"Nothing is gained: {run.name} ends with DDP's own buckets, {seconds(median(own))} a step."
    if min(len(own), len(kept)) < FEWEST_STEPS:
        return ""
    own_s, kept_s = median(own), median(kept)
    times = f"{seconds(kept_s)} a step, DDP's own buckets {seconds(own_s)}; medians of {run.name}"
    if kept_s > (1 - LEAST_GAIN) * own_s:
        return f"The plan in force is no faster than DDP's own buckets ({times})."
    return f"The plan in force is {factor(own_s / kept_s)} as fast as DDP's own buckets ({times})."
