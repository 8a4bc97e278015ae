"""torchao is imported for weights alone: a package of that name that is loud when it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.models import MODEL

SAFETENSORS = "def flatten_tensor_state_dict(state):\n    return 'flattened', state\n"


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    """A folder with a torchao that says so on stderr."""
    files = {
        "torchao/__init__.py": "import sys\nprint('torchao is imported', file=sys.stderr)\n",
        "torchao/prototype/__init__.py": "",
        "torchao/prototype/safetensors/__init__.py": "",
        "torchao/prototype/safetensors/safetensors_support.py": SAFETENSORS,
        "torchao-0.18.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchao\nVersion: 0.18.0\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def ran(folder: Path, code: str) -> tuple[str, str]:
    """Output of Python for `code` with the folder before all others, on stdout and on stderr."""
    start = f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_model_is_loaded_without_torchao(loud: Path) -> None:
    code = f"import windlass\nwindlass.load({MODEL!r})\nprint([each for each in sys.modules if each[:7] == 'torchao'])"
    assert ran(loud, code) == ("[]\n", "")


@pytest.mark.slow
def test_transformers_still_has_torchao_where_it_needs_it(loud: Path) -> None:
    code = (
        "import windlass.engine.generate\n"
        "from transformers.quantizers import quantizer_torchao\n"
        "print(quantizer_torchao.flatten_tensor_state_dict(3))"
    )
    assert ran(loud, code) == ("('flattened', 3)\n", "torchao is imported\n")
