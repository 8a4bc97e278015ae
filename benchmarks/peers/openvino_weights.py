"""The weights of a shape for OpenVINO, from the folder that `weights` wrote. Runs in the environment of OpenVINO.

    PYTHONPATH=benchmarks .venv-peers/openvino/bin/python -m peers.openvino_weights 1b --weights int4 --tokenizer FOLDER

Its pipelines want a tokenizer beside the model, though ids are fed: that of another model will do.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from peers.shape import Shape, shape_of

EXPORTS = {"auto": ["fp16"], "int8": ["int8"], "int4": ["int4", "--group-size", "128", "--ratio", "1.0"]}


def folder_of(shape: Shape, weights: str) -> Path:
    """Where OpenVINO's files of a shape lie."""
    return shape.folder.with_name(f"{shape.folder.name}-openvino-{weights}")


def write_openvino(shape: Shape, weights: str, tokenizer: Path) -> None:
    """Write the model and a tokenizer, unless they are there."""
    folder = folder_of(shape, weights)
    if not (folder / "openvino_model.xml").exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        command += ["--model", str(shape.folder), "--task", "text-generation-with-past", "--disable-convert-tokenizer"]
        subprocess.run([*command, "--weight-format", *EXPORTS[weights], str(folder)], check=True)
    if not (folder / "openvino_tokenizer.xml").exists():
        import openvino
        from openvino_tokenizers import convert_tokenizer
        from transformers import AutoTokenizer

        both = convert_tokenizer(AutoTokenizer.from_pretrained(tokenizer), with_detokenizer=True)
        for name, model in zip(("tokenizer", "detokenizer"), both, strict=True):
            openvino.save_model(model, folder / f"openvino_{name}.xml")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--weights", default="auto", choices=list(EXPORTS))
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    write_openvino(shape_of(options.shape, options.layers), options.weights, options.tokenizer)
