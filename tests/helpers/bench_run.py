"""`windlass bench` run in this process, and its tables as rows."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from windlass.cli.app import main
from windlass.evals.speed.rows import SHAPES, random_model

QUICK = ("bench", "--shape", "tiny", "--threads", "1", "-r", "2")
MARKDOWN = ("--format", "md", "--ratios")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, str]]:
        """The first table, a dict per row."""
        return cells(self.out.split("\n\n")[0])


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def go(*arguments: str) -> Ran:
        form = () if {"--json", "--format"} & set(arguments) else MARKDOWN
        return Ran(main((*QUICK, *form, *arguments)), *capsys.readouterr())

    return go


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return windlass.attach(random_model(SHAPES["tiny"], torch.bfloat16))


def cells(markdown: str) -> list[dict[str, str]]:
    heads, rule, *lines = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in markdown.splitlines())
    assert all(re.fullmatch("-+:?", cell) for cell in rule)
    return [dict(zip(heads, line, strict=True)) for line in lines]
