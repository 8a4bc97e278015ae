"""Pages of the docs site, for mkdocs: documents where they lie in the repository, so that their links are right.

A document may link to a Python file or a notebook, too; each of these becomes a page. All pages are in the navigation
but those of Python files, of results and of the log.
"""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

LINK = re.compile(r"(\]\((?!https?:)[^)#\s]+\.(?:py|ipynb))(?=[)#])")
OTHERS = ("docs/site/site.css", "docs/demo.svg", "docs/view.png")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation, with notebooks under the names of their pages."""
    config.nav = _renamed(config.nav)
    return config


def _renamed(nav: Any) -> Any:
    if isinstance(nav, str):
        return f"{nav}.md" if nav.endswith(".ipynb") else nav
    return [_renamed(each) for each in nav] if isinstance(nav, list) else {key: _renamed(nav[key]) for key in nav}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of the navigation and the Python files that these link to, in place of the folder `docs`."""
    root = Path(config.config_file_path).parent
    for file in [each for each in files if each.src_dir == config.docs_dir]:
        files.remove(file)
    named = [name.removesuffix(".ipynb.md") + ".ipynb" * name.endswith(".ipynb.md") for name in _leaves(config.nav)]
    beside = {str(path.relative_to(root)) for path in (root / "docs" / "results").glob("*.md")} | {"docs/log.md"}
    for name in [*named, *OTHERS]:
        files.append(_file(config, root, name))
    for name in sorted(beside - set(named)):
        files.append(_file(config, root, name, InclusionLevel.NOT_IN_NAV))
    for name in sorted({linked for each in {*named, *beside} for linked in _linked(root, each)} - set(named)):
        files.append(_file(config, root, name))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Links to Python files and notebooks lead to their pages."""
    return LINK.sub(r"\1.md", markdown)


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for each in nav if isinstance(nav, list) else nav.values():
        yield from _leaves(each)


def _linked(root: Path, name: str) -> Iterator[str]:
    """The Python files and notebooks that a document of the repository links to; those that exist."""
    if not name.endswith(".md"):
        return
    for link in LINK.findall((root / name).read_text()):
        target = (root / name).parent.joinpath(link.removeprefix("](")).resolve()
        if target.is_file():
            yield str(target.relative_to(root.resolve()))


def _file(config: MkDocsConfig, root: Path, name: str, inclusion: InclusionLevel = InclusionLevel.UNDEFINED) -> File:
    path = root / name
    if path.suffix == ".ipynb":
        return File.generated(config, f"{name}.md", content=notebook_page(path.read_text()))
    if path.suffix == ".py":
        page = f"# {path.name}\n\n`{name}`\n\n```python\n{path.read_text()}```\n"
        return File.generated(config, f"{name}.md", content=page, inclusion=InclusionLevel.NOT_IN_NAV)
    return File.generated(config, name, abs_src_path=str(path), inclusion=inclusion)


def notebook_page(notebook: str) -> str:
    """A notebook as Markdown: its cells, each with the outputs that are stored with it."""
    return "\n\n".join(part for cell in json.loads(notebook)["cells"] for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "text/html" in data:
            yield f'<div class="output">{"".join(data["text/html"])}</div>'
        else:
            yield f'<div class="output"><pre>{html.escape("".join(data["text/plain"]))}</pre></div>'
