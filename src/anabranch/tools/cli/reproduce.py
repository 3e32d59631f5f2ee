"""anabranch reproduce: a paper's figures and what this project gets, where the repository's benchmarks are."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument

from anabranch.tools.cli.shared_options import JsonOption
from anabranch.values.errors import AnabranchError


def reproduce(
    paper: Annotated[str, Argument(help="mgwfbp, asc, oktopk or laysa.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Print a paper's figures and what this project gets for each; in a clone of the repository."""
    if Path("benchmarks", "papers").is_dir():  # in the root of a clone
        sys.path.insert(0, str(Path.cwd()))
    if find_spec("benchmarks") is None or find_spec("benchmarks.papers") is None:
        raise AnabranchError(
            "the papers' figures are in the repository, not in the package; in a clone run: "
            f"python -m benchmarks.papers {paper}"
        )
    import_module("benchmarks.papers.__main__").print_paper(paper, as_json)
