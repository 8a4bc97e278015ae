"""The report: results files in, one HTML page and its figures out. Reads only files of `windlass eval`.

summaries.py  cases to means, intervals and the verdict
plots.py      figures, the only file that knows matplotlib
page.py       the page and its files
templates/    the words of the page and of verdicts
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(["html"]),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)


def sentence_of(template: str, facts: Mapping[str, object]) -> str:
    """The text of a template in one line."""
    return " ".join(TEMPLATES.get_template(template).render(facts).split())
