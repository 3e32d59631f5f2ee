"""Templates of pages and of sentences, which escape what comes from files."""

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from anabranch.tools.report import formatting
from anabranch.tools.report.documents import BASELINE, COMPUTE, LEAST_GAIN, OURS

FILTERS = ("seconds", "percent", "signed_percent", "factor", "count", "shortened")  # of formatting


def environment(*functions: Callable[..., Any]) -> Environment:
    """The templates in ``assets``, which may call these functions.

    Values are escaped for HTML, not in .txt, and so are their control characters. JSON can end no script element.
    """
    templates = Environment(
        loader=PackageLoader("anabranch.tools.report", "assets"),
        autoescape=lambda name: name is None or not name.endswith(".txt"),
        finalize=lambda value: formatting.plain(value) if type(value) is str else value,  # markup is a subclass of str
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    templates.filters |= {name: getattr(formatting, name) for name in FILTERS}
    templates.globals |= {function.__name__: function for function in functions}
    templates.globals |= {"BASELINE": BASELINE, "COMPUTE": COMPUTE, "OURS": OURS, "LEAST_GAIN": LEAST_GAIN}
    return templates
