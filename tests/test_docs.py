"""The docs speak of what is there: links lead somewhere, files that are named exist, pictures show what is, examples run."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.parse
from pathlib import Path

import pytest

from headwise import cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")),
    *sorted((ROOT / "bench" / "notes").glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
]
TREE = [str(path.relative_to(ROOT)) for folder in ("src", "tests", "scripts") for path in (ROOT / folder).rglob("*.*")]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]

_LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)")
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(headwise|make) [a-z]")
_EXTRAS = re.compile(r"pip install [^`\n]*\[([a-z,]+)\]")
_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|wgsl))`")
_FILE_IN_DRAWING = re.compile(r"(?<![\w.>/-])((?:[\w.-]+/)*[\w-]+\.(?:py|wgsl))\b")

# Pages whose blocks are files and not one program -> what runs them instead.
NOT_RUN_HERE = {
    "docs/adding-an-op.md": "tests/test_adding_an_op.py follows the page",
    "docs/adding-a-backend.md": "tests/test_adding_a_backend.py follows the page",
}
# Pages with drawings, or with whole files of the package, as wide as the package has them.
WIDE = (
    *NOT_RUN_HERE,
    *(f"docs/{name}.md" for name in ("hopper-attention", "cpu-kernels", "webgpu-kernels", "error-budget")),
)
RANKS = {"docs/distributed.md": 2}  # pages that torchrun runs
LOUD = ("docs/transformers.md",)  # other people's warnings
# What a page takes as given: page -> words of a block -> what goes before it. It runs in the empty folder `tmp`; `root` is
# the repository.
GIVEN = {
    "docs/distributed.md": {
        "init_process_group": """
import torch
length = 32
tokens, labels = torch.randint(100, (2, 1, length))
q, (k, v) = torch.randn(1, 4, 16, 8), torch.randn(2, 1, 2, 16, 8)
""",
    },
    "docs/transformers.md": {
        "from_pretrained(name": """
import transformers
name = str(tmp)
transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
)).save_pretrained(name)
""",
        "generate_batch": """
inputs = [[5, 6, 7], [8, 9]]
generation = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
batching = transformers.ContinuousBatchingConfig(
    auto_switch_to_flash=False, num_blocks=40, page_size=8, max_batch_tokens=32
)
""",
    },
    "docs/integrations.md": {
        "sdpa.override()": """
import torch
model, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 8, 16)
model = (lambda attention: lambda x: attention(x, x, x))(model)
""",
        "Backend.prepare(model)": """
from onnx import TensorProto, helper
node = helper.make_node("RMSNormalization", ["x", "scale"], ["y"])
shapes = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (
    ("x", [2, 8]), ("scale", [8]), ("y", [2, 8]))}
graph = helper.make_graph([node], "norm", [shapes["x"], shapes["scale"]], [shapes["y"]])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
inputs = [torch.randn(2, 8).numpy(), torch.ones(8).numpy()]
""",
        "get_local_kernel": """
import runpy
runpy.run_path(root / "scripts" / "hub_kernel.py")["lay_out"](tmp / "dist" / "hub-kernel")
""",
    },
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def broken_links(page: Path, text: str) -> list[str]:
    return [link for link in _LINK.findall(_BLOCK.sub("", text)) if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert broken_links(page, text_of(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_external_links_are_whole(page):
    """Whether somebody answers is not asked: tests need no network."""
    links = [urllib.parse.urlsplit(link) for link in re.findall(r"\]\((\w+://[^)]*)\)", text_of(page))]
    assert [link.geturl() for link in links if link.scheme != "https" or "." not in link.netloc] == []


def test_a_broken_link_is_seen():
    assert broken_links(DOCS / "faq.md", "[a](nowhere.md) [b](index.md#settings) [c](https://x.org)") == ["nowhere.md"]


def files_named(text: str) -> set[str]:
    """In the text, and in blocks of no language: trees of files, diagrams."""
    drawings = [block for block in _BLOCK.findall(text) if block.startswith("```\n")]
    drawn = {name for block in drawings for name in _FILE_IN_DRAWING.findall(block)}
    return drawn | set(_FILE.findall(_BLOCK.sub("", text)))


def test_files_are_found_in_text_and_in_drawings_but_not_in_code():
    text = "`a.py`\n```\nb/c.py   <op>.py\nd.wgsl\n```\n```python\nimport e.py\n```\nnot f.py `x.y`\n```sh\ng.py\n```\n"
    assert files_named(text) == {"a.py", "b/c.py", "d.wgsl"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    named = files_named(text_of(page))
    if page.name == "adding-an-op.md":
        named = {name for name in named if "scale_and_add" not in name}
    if page.name == "adding-a-backend.md":
        named = {name for name in named if "/wonder/" not in name}
    missing = [name for name in sorted(named) if not any(f"/{known}".endswith(f"/{name}") for known in TREE)]
    assert missing == []


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in WIDE], ids=name_of)
def test_code_fits_beside_the_columns_of_the_site(page):
    wide = [line for block in _BLOCK.findall(text_of(page)) for line in block.splitlines() if len(line) > 100]
    assert wide == []


def test_every_page_is_in_the_navigation():
    """Those that lie in docs/ itself are put there by scripts/site_hooks.py if mkdocs.yml does not name them."""
    pages = {page: page.relative_to(DOCS).as_posix() for page in sorted(DOCS.glob("*/*.md"))}
    assert [name for name in pages.values() if f" {name}\n" not in NAV] == []


def test_the_readme_fits_one_screen_or_two():
    assert text_of(ROOT / "README.md").count("\n") <= 120


@pytest.mark.parametrize("script", ["draw_architecture", "draw_grids", "update_readme"])
def test_what_scripts_write_is_current(script):
    drawn = subprocess.run([sys.executable, f"scripts/{script}.py", "--check"], cwd=ROOT, check=False)
    assert drawn.returncode == 0, f"python scripts/{script}.py writes it anew"


def program(page: Path, text: str) -> str:
    """All python blocks of a page, from top to bottom; of a console session what was typed."""
    given = GIVEN.get(name_of(page), {})
    parts = []
    for language, block in _PYTHON.findall(text):
        parts += [code for words, code in given.items() if words in block]
        parts += [e.source for e in doctest.DocTestParser().get_examples(block)] if language == "pycon" else [block]
    return "\n".join(parts)


def in_a_process(code: str, file: Path, ranks: int | None) -> None:
    file.write_text(code, encoding="utf-8")
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else ["-W", "error"]
    )
    run = subprocess.run([sys.executable, *launcher, str(file)], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def _pages_with_examples():
    for page in PAGES:
        if _PYTHON.search(text_of(page)) and name_of(page) not in NOT_RUN_HERE:
            ignored = [pytest.mark.filterwarnings("ignore")] if name_of(page) in LOUD else []
            yield pytest.param(page, id=name_of(page), marks=ignored)


@pytest.mark.parametrize("page", list(_pages_with_examples()))
def test_examples_run(page, tmp_path, monkeypatch):
    code, ranks = program(page, text_of(page)), RANKS.get(name_of(page))
    # hw.webgpu: PyTorch's autograd learns of devices at the first backward of a process.
    if ranks or "hw.webgpu" in code:
        in_a_process(code, tmp_path / "page.py", ranks)
    else:
        monkeypatch.chdir(tmp_path)
        exec(compile(code, name_of(page), "exec"), {"__name__": "__main__", "tmp": tmp_path, "root": ROOT})


def commands(page: Path) -> list[list[str]]:
    """Every `headwise …`, `make …` and extra that a page names, in blocks and in sentences."""
    text = text_of(page)
    lines = [line for block in _SHELL.findall(text) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", _BLOCK.sub("", text))
    found = [shlex.split(line.partition("  #")[0].replace("…", "")) for line in lines if _COMMAND.match(line)]
    return [*found, *(["pip", extra] for names in _EXTRAS.findall(text) for extra in names.split(","))]


def wrong_with(command: list[str]) -> str:
    """Parses and looks up; nothing is run."""
    program, *arguments = command
    if program == "pip":
        return "" if arguments[0] in EXTRAS else "no such extra"
    if program == "make":
        targets = [a for a in arguments if "=" not in a]
        return "" if all(re.search(rf"^{re.escape(t)}:", MAKEFILE, re.MULTILINE) for t in targets) else "no such target"
    if len(arguments) == 1 and arguments[0] in cli.COMMANDS:
        return ""  # spoken of, perhaps without what it needs
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            cli._parser(arguments[0])[0].parse_args(arguments)
    except SystemExit as end:
        return said.getvalue() if end.code else ""
    return ""


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in NOT_RUN_HERE], ids=name_of)
def test_commands_are_understood(page):
    found = {" ".join(command): wrong_with(command) for command in commands(page)}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("command", ["headwise bench --nowhere", "headwise sing", "make haste", "pip cuda"])
def test_a_wrong_command_is_seen(command):
    assert wrong_with(command.split())


def test_a_broken_example_is_seen():
    broken = program(DOCS / "faq.md", "```python\nx = 1\n```\n\n```pycon\n>>> print(y)\n1\n```\n")
    with pytest.raises(NameError):
        exec(broken, {})


def test_pages_that_are_not_run_are_there():
    assert [name for name in [*NOT_RUN_HERE, *RANKS, *LOUD, *GIVEN] if not (ROOT / name).exists()] == []
