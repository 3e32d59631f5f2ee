"""The README and docs/ say what is true: links lead somewhere, snippets run, commands and messages exist."""

import ast
import contextlib
import importlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.main import get_command

import anabranch as ab
from anabranch.tools.cli.main import app, main
from ranks import on_ranks, patience

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md") if (ROOT / name).is_file()] + sorted(
    (ROOT / "docs").rglob("*.md")
)
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="docs/ is not beside the tests")

README_LINES = 150
LONGEST_LINE = 140
MOST_NOT_RUN = 2  # Python snippets that need a cluster or a GPU
RANKS = 2
BATCHES = 8
# Commands that end within a second or two; the others are only parsed.
EXECUTED = {"compare", "plan", "simulate", "show", "scale", "list", "record", "import-trace", "memory", "report"}
NEEDS_MODELS = {"--model", "record"}

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- no-run: [^\n]+ -->\n\Z")
LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)")
VALUE = re.compile(r"…|<[^>]*>|DDP's own buckets|: ")  # what a message fills in
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


class Fence(NamedTuple):
    """A fenced block: its page, the line it begins at, its language, its text, and whether it is said not to run."""

    page: Path
    line: int
    language: str
    text: str
    not_run: bool

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def fences(page: Path) -> list[Fence]:
    text = page.read_text(encoding="utf-8")
    return [
        Fence(page, text.count("\n", 0, m.start()) + 1, m[1].strip(), m[2], bool(NOT_RUN.search(text[: m.start()])))
        for m in FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


ALL = [fence for page in PAGES for fence in fences(page)]


# The README.


def test_the_readme_is_short_and_has_no_walls_of_text() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES
    assert not [line for line in lines if len(line) > LONGEST_LINE]


def test_extras_and_make_targets_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = {name for group in re.findall(r"\.\[([\w,]+)\]", text) for name in group.split(",")}
        assert named <= set(extras), page.name
        assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)) <= targets, page.name


# Links.


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as both GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower() for heading in headings]
    of_github = [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain]
    of_site = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain]
    return set(of_github) & set(of_site) | set(DIRECTIVE.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert file.is_relative_to(ROOT), f"{page.name}: {target}"
        if anchor:
            assert anchor in slugs(file), f"{page.name}: {target} has no such heading"


def test_every_page_of_docs_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES if page.name != "README.md" and page.name not in navigation]


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", text))
    assert not {name for name in ab.__all__ if not name.startswith("_")} - named
    for directive in DIRECTIVE.findall(text):
        module, _, name = directive.rpartition(".")
        assert hasattr(importlib.import_module(module), name), directive


# Python snippets, each by itself on real ranks, with a model, an optimizer and batches at hand.


def python_snippets() -> list[Fence]:
    return [fence for fence in ALL if fence.language in ("python", "diff")]


def code_of(fence: Fence) -> str:
    """The snippet; of a diff, what it looks like afterwards."""
    if fence.language == "python":
        return fence.text
    return "\n".join(line[1:] for line in fence.text.splitlines() if not line.startswith("-"))


def run_snippets(rank: int, folder: str, snippets: list[tuple[str, str]]) -> dict[str, str]:
    """What went wrong in each snippet on this rank; nothing if it ran."""
    failures = {}
    os.chdir(folder)
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # of torch's own, when it imports inductor
    for name, code in snippets:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        batches = [(torch.randn(4, 64), torch.randint(0, 10, (4,))) for _ in range(BATCHES)]
        names: dict[str, Any] = {
            "ab": ab, "torch": torch, "dist": dist, "Path": Path, "__name__": "snippet", "model": model,
            "batches": batches, "loss_function": nn.functional.cross_entropy,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        }  # fmt: skip
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                exec(compile(code, name, "exec"), names)
                if name.startswith("docs/memory.md") and "build" in names:
                    names["build"](2, "cpu")
        except Exception:
            failures[name] = traceback.format_exc()
            break  # the other rank may be waiting for this one
        close = getattr(names["model"], "close", None)
        if close is not None:
            close()
        dist.barrier()
    return failures


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that snippets and commands read: a run's, and a module with functions of the user's."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "run").mkdir()
    network = ab.Network.ring(4, alpha_s=30e-6, beta_s_per_byte=8e-10)
    trace = ab.load(ROOT / "src" / "anabranch" / "values" / "traces" / "googlenet.json")
    assert isinstance(trace, ab.Trace)
    ab.save(trace, folder / "run" / "trace.json")
    ab.save(network, folder / "network.json")
    (folder / "train.py").write_text(TRAIN)
    return folder


TRAIN = """
import torch

def setup():
    model = torch.nn.Linear(8, 8)
    return model, lambda: model(torch.ones(2, 8)).sum().backward()

def build(batch, device):
    model = torch.nn.Linear(8, 8).to(device)
    inputs = torch.zeros(batch, 8, device=device)
    return model, lambda model: model(inputs).sum()
"""


@pytest.mark.slow
def test_python_snippets_run(play: Path) -> None:
    snippets = [(fence.name, code_of(fence)) for fence in python_snippets() if not fence.not_run]
    assert len(snippets) > 15
    for failures in on_ranks(run_snippets, RANKS, str(play), snippets, timeout_s=90.0):
        assert not failures, "\n".join(failures.values())


def test_few_snippets_are_left_out() -> None:
    assert sum(fence.not_run for fence in python_snippets()) <= MOST_NOT_RUN


# Commands.


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every call of anabranch in a block of shell lines, also under torchrun and inside a lab."""
    for fence in ALL:
        for line in fence.text.splitlines() if fence.language in ("", "sh", "bash") else []:
            words = shlex.split(line, comments=True)
            while words:
                if words[0] == "anabranch":
                    yield fence.name, words[1:]
                    words = words[words.index("--") + 1 :] if "--" in words else []
                elif words[0] == "torchrun" and "anabranch" in words:
                    words = words[words.index("anabranch") :]
                else:
                    break


COMMANDS = list(command_lines())


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[f"{where} {words[0]}" for where, words in COMMANDS])
def test_commands_parse(where: str, words: list[str]) -> None:
    group: Any = get_command(app)
    assert words[0] in group.commands, f"{where}: no such command"
    group.commands[words[0]].make_context(words[0], list(words[1:]))


def can_run(words: list[str]) -> bool:
    """Whether a command is quick, and its model, if it names one, can be built here."""
    named = "--model" in words and ":" not in words[words.index("--model") + 1]
    has_models = all(importlib.util.find_spec(name) for name in ("torchvision", "transformers"))
    return words[0] in EXECUTED and (has_models or not named)


@pytest.mark.slow
def test_quick_commands_run(play: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(play)
    monkeypatch.syspath_prepend(str(play))
    model, inputs = nn.Linear(8, 8), torch.ones(2, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        model(inputs).sum().backward()
    profile.export_chrome_trace("profile.json")
    names = tuple(name for name, _ in reversed(list(model.named_parameters())))
    ab.save(ab.Plan((ab.Bucket(names),)), "plan.json", force=True)
    (play / "run.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.4}\n')
    ran = set()
    for where, words in COMMANDS:
        given = [word for word in words[1:] if word in ("run/", "run", "run.jsonl", "steps.json")]
        words = [word for word in words if word not in given or (play / word).exists()]
        if can_run(words):
            writes = words[0] not in ("compare", "scale", "show", "memory", "list")
            forced = ["--force"] if writes and "--force" not in words else []
            assert main([*words, *forced]) == 0, f"{where}: {shlex.join(words)}: {capsys.readouterr().err}"
            ran.add(words[0])
    sys.modules.pop("train", None)
    assert ran >= {"compare", "plan", "simulate", "show", "scale", "record", "import-trace", "report"}


# Paths.

PATH = re.compile(r"`((?:\w+/)+(?:\w+(?:\.py)?)?)`")  # `planning/prices.py`, `tuning/`, `exchange/residuals`


def test_paths_in_the_documents_exist() -> None:
    """What describes the code names its files and folders, in full or from a room on."""
    pages = [
        *sorted((ROOT / "docs" / "design").glob("*.md")),
        *(ROOT / "docs" / n for n in ("design.md", "how-it-works.md")),
    ]
    found = {
        (page.name, path.rstrip("/"))
        for page in [*pages, ROOT / "CONTRIBUTING.md"]
        for path in PATH.findall(prose(page))
    }
    assert len(found) > 30
    known = [
        path.relative_to(ROOT).with_suffix("").as_posix()
        for folder in ("src", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*")
    ]
    known += ["src", "tests", "benchmarks", "docs"]
    assert {
        name
        for name in found
        if not any(f"/{one}".endswith("/" + name[1].removesuffix(".py").removesuffix(".md")) for one in known)
    } == set()


# Messages.


def literals() -> set[str]:
    """Every text in the source, with a gap where a value is filled in."""
    found = set()
    for file in sorted((ROOT / "src" / "anabranch").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                pieces = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.add("".join(pieces))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_messages_in_troubleshooting_are_those_of_the_source() -> None:
    known = "\n".join(literals())
    rows = re.findall(r"^\| (.+?) \|", prose(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE)
    messages = [span for row in rows for span in re.findall(r"`([^`]+)`", row) if " " in span]
    assert len(messages) > 50
    for message in messages:
        words = re.sub(r"^\w+Error: ", "", message)
        for piece in re.split(VALUE, words):
            piece = piece.strip().strip("(),:")
            assert piece in known, f"{message!r}: no message has {piece!r}"


# The site.


@pytest.mark.campaign
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100 * patience(),
        check=False,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    fetched = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?://")
    for page in (tmp_path / "site").rglob("*.html"):
        assert not fetched.search(page.read_text(encoding="utf-8")), f"{page.name} fetches something"
