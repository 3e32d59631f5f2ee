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
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.console import RenderableType
from rich.text import Text

from anabranch.tools.report import (
    benchmark,
    comparison,
    demo,
    figures,
    formatting,
    memory,
    scaling,
    steps,
    tables,
    training,
)
from anabranch.tools.report.documents import BASELINE, COMPUTE, LEAST_GAIN, OURS, DemoDocument
from anabranch.tools.report.runs import Runs, file_table
from anabranch.values.dependencies import require
from anabranch.values.version import __version__

SCRIPTS = ("theme.js", "tables.js", "charts.js")
FILTERS = ("seconds", "percent", "signed_percent", "factor", "count", "shortened")  # of formatting
CALLED = (
    benchmark.benchmark_chart, benchmark.benchmark_table, comparison.comparison_tables,
    demo.demo_table, demo.loss_chart, enumerate, figures.planned_buckets, file_table, memory.memory_chart,
    memory.memory_tables, scaling.network_chart, scaling.scaling_charts, steps.step_chart, tables.bucket_table,
    training.stage_table, training.training_chart,
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
    """The templates in ``assets``, with all that they call.

    Values are escaped for HTML, not in .txt, and so are their control characters. JSON can end no script element.
    """
    pages = Environment(
        loader=PackageLoader("anabranch.tools.report", "assets"),
        autoescape=lambda name: name is None or not name.endswith(".txt"),
        finalize=lambda value: formatting.plain(value) if type(value) is str else value,  # markup is a subclass of str
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    pages.filters |= {name: getattr(formatting, name) for name in FILTERS} | {"median": median}
    pages.globals |= {function.__name__: function for function in (*CALLED, *demo.SENTENCES)}
    pages.globals |= {"BASELINE": BASELINE, "COMPUTE": COMPUTE, "OURS": OURS, "LEAST_GAIN": LEAST_GAIN}
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


def headline(runs: Runs) -> str:
    """The first of the run's measurements in a sentence: how much was gained, or that nothing was; else empty."""
    words: Any = templates().get_template("sentences.txt").module
    benchmarks = [found for _, bench in runs.benches for found in bench.benchmarks]
    gains = filter(None, map(training.layout_gain, runs.trainings))
    said = [words.headline(found) for _, found in runs.demos]
    said += [words.benchmark_gain(found) for found in benchmarks if OURS in {row.name for row in found.rows}]
    return next(iter([*said, *map(words.training_gain, gains)]), "")


def demo_report(found: DemoDocument) -> list[RenderableType]:
    """A demo's summary for a terminal: the table, what was chosen, and what it means."""
    chosen = "".join(f"\n{formatting.plain(f'{one.name}: {one.chosen}')}" for one in found.trainings if one.chosen)
    lines = templates().get_template("demo.txt").render(found=found).split("\n")
    words = [formatting.plain(" ".join(line.split())) for line in lines if line.strip()]
    table = tables.terminal(demo.demo_table(found))
    return [table, Text.assemble(("What was chosen:", "bold"), chosen), Text("\n".join(words))]
