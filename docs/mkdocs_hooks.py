"""The site's pages from all over the repository: README.md as its front page, CONTRIBUTING.md, reports, examples.

Links are written as they work in the repository, relative to the file. Here they are turned into links of the site,
where everything of docs/ lies one folder higher.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "benchmarks/*.md", "benchmarks/*.svg", "examples/*.py")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add what is not in docs/."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for pattern in OTHERS:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the repository as links of the site."""
    source = page.file.src_uri
    docs = page.file.generated_by is None

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith("#"):
            return match[0]
        if docs:
            target = target.removeprefix("../")
            target = "lab.md#reports-in-this-repository" if target == "benchmarks" else target
            target = target.replace("README.md", "index.md")
        elif "/" in source:
            target = re.sub(r"^\.\./docs/", "../", target)
        else:
            target = re.sub(r"^docs/", "", target).replace("README.md", "index.md")
        return f"{match[1]}{target}{match[3]}"

    return LINK.sub(moved, markdown)
