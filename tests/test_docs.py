"""Documents are run, or compared with the code they describe."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import types
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from mypy import api as mypy_api

import windlass
from windlass import policies
from windlass.cli.app import main
from windlass.policies import FROM_FILES, NAMES, base
from windlass.positions.modes import MODES
from windlass.stores.formats import STORES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
DOCUMENTS = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "examples" / "README.md"]
CODE_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
EXAMPLES = {  # the output of each example
    "1_generate": ["The pass key is 48213", "256 of 288 slots"],
    "2_transformers_generate": ["second turn ->", "52 tokens seen"],
    "3_write_a_policy": ["LargeKeys keeps the contract", "answered: 48213"],
    "4_compare_policies": [r"KeyDiff\(\) +3 of 3", r"Recent\(\) +0 of 3"],
    "5_edit_the_text": [r"splice .* ->  48213", "keys unchanged: True", r"drop .* ->  (?!48213)"],
}


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like the project's root and may be written to."""
    (tmp_path / "windlass").symlink_to(ROOT / "windlass")
    monkeypatch.chdir(tmp_path)


def run_blocks(page: Path) -> dict[str, object]:
    """The names that the Python of a page leaves, its blocks run in turn."""
    names: dict[str, object] = {"__name__": page.stem}
    blocks = CODE_BLOCK.findall(page.read_text())
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    return names


def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cache = run_blocks(ROOT / "README.md")["cache"]
    assert len(capsys.readouterr().out) > 40
    assert isinstance(cache, windlass.KVCache)
    assert cache.tokens_seen[0] > 20


def test_the_start_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks(DOCS / "start.md")
    assert len(capsys.readouterr().out) > 20
    assert isinstance(names["ids"], torch.Tensor)


def test_the_page_about_parts_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(DOCS / "chunks.md")
    assert "4821376" in capsys.readouterr().out


def test_the_policy_of_the_contract_is_a_whole_file(capsys: pytest.CaptureFixture[str]) -> None:
    """As the sentence after it says: `--policy file.py:LargeValues`."""
    kind = run_blocks(DOCS / "contract.md")["LargeValues"]
    assert isinstance(kind, type)
    windlass.testing.check_policy(kind())
    [block] = CODE_BLOCK.findall((DOCS / "contract.md").read_text())
    Path("file.py").write_text(block)
    options = ("--budget", "12", "-n", "2", "--policy", "file.py:LargeValues", "--device", "cpu", "-q")
    assert main(("generate", "windlass/assets/finder-3m", "He was in the boat, and the river was", *options)) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name[0] in "245")) for name in EXAMPLES]
)  # the fourth reads three long texts
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    for wanted in EXAMPLES[name]:
        assert re.search(wanted, said), f"{wanted!r} is not in:\n{said}"


def test_every_example_is_run() -> None:
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.py")) == sorted(EXAMPLES)


def test_generated_pages_are_fresh() -> None:
    """After a change of a docstring: python docs/generate.py."""
    generate = module_at(ROOT / "docs" / "generate.py")
    assert (ROOT / "docs" / "contract.md").read_text() == generate.contract()
    assert (DOCS / "results" / "policies.md").read_text() == generate.catalogue()


def module_at(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_contract_is_whole() -> None:
    """Every line of the docstring, whatever the generator does."""
    page = (ROOT / "docs" / "contract.md").read_text()
    for line in (base.__doc__ or "").strip().splitlines():
        assert line.strip().removesuffix(".") in page


def test_the_public_names() -> None:
    assert windlass.__all__ == sorted(windlass.__all__)
    for name in windlass.__all__:
        home = getattr(getattr(windlass, name), "__module__", f"windlass.{name}")
        assert home.startswith("windlass."), name
    with pytest.raises(AttributeError, match="has no attribute 'KVCash'"):
        _ = windlass.KVCash  # type: ignore[attr-defined]
    stub = Path(windlass.__file__).with_suffix(".pyi").read_text()
    hints = {name: home for home, name in re.findall(r"^from ([\w.]+) import (\w+) as \2$", stub, re.MULTILINE)}
    homes, modules = (vars(windlass)[name] for name in ("_HOMES", "_MODULES"))
    assert hints == homes | {name: module.rpartition(".")[0] for name, module in modules.items()}, "for type checkers"
    assert sorted(hints) == windlass.__all__
    assert len(hints) <= 30
    for home, kinds in ((windlass.policies, NAMES), (windlass.positions, MODES), (windlass.stores, STORES)):
        assert {kind.__name__ for kind in kinds.values()} - {"Auto"} <= set(dir(home))  # which "auto" makes


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    import windlass.hf.load  # a room that is imported is an attribute of the package, but not one of its names

    assert dir(windlass) == sorted([*windlass.__all__, "__version__"])


def test_a_typo_is_told_the_nearest_name() -> None:
    wrong = subprocess.run([sys.executable, "-c", "import windlass; windlass.KVCash"], capture_output=True, text=True)
    assert wrong.stderr.endswith("module 'windlass' has no attribute 'KVCash'. Did you mean: 'KVCache'?\n")


def test_type_checkers_see_a_typo(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("import windlass\n\nwindlass.KVCache\nwindlass.policies\nwindlass.KVCash\n")
    # Only the stub is read: following its imports would take a minute.
    options = ["--follow-imports=skip", "--no-incremental", f"--config-file={os.devnull}"]
    said, _, code_of_mypy = mypy_api.run([*options, str(Path(windlass.__file__).with_suffix(".pyi")), str(code)])
    assert code_of_mypy == 1
    assert 'code.py:5: error: Module has no attribute "KVCash"' in said
    assert said.count("error") == 2  # and once in the line that counts them


def test_the_architecture_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "windlass").glob("*/__init__.py")}
    assert [room for room in sorted(rooms) if f"`{room}`" not in page] == []
    files = re.findall(r"`((?:windlass|tests)/[^`]*)`", page)
    assert len(files) >= 10
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """To a file, and to a heading of it. `make docs` checks the same for the site."""
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", document.read_text())
    targets = [(document.parent / link if link else document, heading) for link, heading in links]
    assert [str(target) for target, _ in targets if not target.exists()] == []
    assert [(str(target), heading) for target, heading in targets if heading and heading not in headings(target)] == []


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings."""
    found = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_page_of_the_site_is_there() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    pages = re.findall(r": (\S+)$", nav, re.MULTILINE)
    assert [page for page in pages if not (ROOT / page).is_file()] == []
    beside = {DOCS / "log.md", *(DOCS / "results").glob("*.md")}  # found by the index of results
    documents = {document for document in DOCUMENTS if document.parent != ROOT} - beside
    assert {ROOT / page for page in pages} >= documents
    index = (DOCS / "results" / "README.md").read_text()
    names = re.findall(r"\]\(([^)]*)\)", index)
    assert {(DOCS / "results" / name).resolve() for name in names} | {DOCS / "results" / "README.md"} == beside


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in windlass.__all__ if not re.search(rf"\bwindlass\.(\w+\.)?{name}\b", page)] == []
    shown = re.findall(r"^::: (windlass\.\S+)", page, re.MULTILINE)
    members = page.partition("::: windlass.KVCache\n")[2].partition("\n\n")[0]
    shown += [f"windlass.KVCache.{name}" for name in re.findall(r"^ +- (\w+)$", members, re.MULTILINE)]
    assert len(shown) > 70
    for name in shown:
        assert attrgetter(name.removeprefix("windlass."))(windlass) is not None


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    """After a change of the notebook: python docs/notebook.py."""
    notebook = module_at(ROOT / "docs" / "notebook.py")
    stored = json.loads(notebook.NOTEBOOK.read_text())
    assert notebook.run(stored) == stored


def test_the_start_page_has_the_sessions() -> None:
    """The page has the typed lines in this order: python docs/terminal.py records the answers."""
    terminal = module_at(ROOT / "docs" / "terminal.py")
    for session in terminal.SESSIONS:
        shown = re.search(rf"<!-- session: {session.name} -->\n(.*?)<!-- end -->", terminal.PAGE.read_text(), re.DOTALL)
        assert shown is not None
        rest = re.sub(r"\s", "", shown[1])  # a long line is broken at the screen's edge
        for step in session.steps:
            typed = re.sub(r"\s", "", step.typed)
            assert typed in rest, f"{step.typed!r} is not in:\n{shown[1]}"
            rest = rest.partition(typed)[2]


def test_the_first_screen() -> None:
    before = README[: README.index("```sh")]
    assert {"KV", "Llama,", "Alpha:"} <= set(before.split()), "the idea, the models, the state"
    screen = README[: README.index("<!-- table:end -->")]
    assert "windlass demo" in screen
    assert "](docs/demo.svg)" in screen
    assert len(re.findall(r"^\| .*(?:full cache|budget).* \|$", screen, re.MULTILINE)) == 3
    assert "make test" in README


def test_the_picture_is_that_of_the_session() -> None:
    """After the demo was recorded again: python docs/picture.py."""
    picture = module_at(DOCS / "picture.py")
    stored = picture.PICTURE.read_text()
    assert stored == picture.picture()
    assert len(stored) < 150_000
    assert "KeyDiff,&#160;recall" in stored


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("path", sorted(Path(policies.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_a_policy_file_tells_its_source(path: Path) -> None:
    """One method a file, each in `NAMES`, or in `FROM_FILES` if it needs one. It holds `Source:` and `Differs:`."""
    text = path.read_text()
    if re.search(r"^class \w+\(Policy(, (?!ABC)\w+)*\)", text, re.MULTILINE):
        assert path.stem in NAMES | FROM_FILES
        assert "Source: " in text
        assert "Differs: " in text
    else:
        assert path.stem not in NAMES
