"""What `--verbose` says on stderr: what was chosen, what each phase took, and what the cache holds."""

from pathlib import Path

import torch

from windlass.cli.session import Asked, Session
from windlass.cli.terminal import note
from windlass.engine import templates
from windlass.engine.result import Result
from windlass.hf.weights import labelled, parameter_count


def say_chosen(session: Session, asked: Asked) -> None:
    """The model and where it runs, the cache's options, and what becomes of a prompt."""
    model = session.model
    name = labelled(Path(str(model.config.name_or_path)).name or "model", model)
    dtype, device = str(model.dtype).removeprefix("torch."), model.device
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count > 1)}" if device.type == "cpu" else ""
    millions = parameter_count(model) / 1e6
    labels = session.cache.options.labels().items()
    note(f"model: {name}, {type(model).__name__}, {millions:,.2f} M parameters, {dtype} on {device}{threads}")
    note("cache: " + ", ".join(f"{option} {'all' if value is None else value}" for option, value in labels))
    if not templates.has_template(session.tokenizer):
        note("prompt: as it stands; this model has no chat template")
    else:
        note(f"prompt: {'as it stands (--raw)' if asked.is_raw else 'in the chat template of the model'}")


def say_done(session: Session, result: Result) -> None:
    """The seconds of each phase, and what the cache holds."""
    read, written = result.prompt_tokens, len(result.tokens)
    phases = [f"load {session.load_s:.2f} s"]
    if result.prefill_tokens_per_s:
        phases.append(f"prefill {read / result.prefill_tokens_per_s:.2f} s")
    if result.decode_tokens_per_s:
        phases.append(f"decode {written / result.decode_tokens_per_s:.2f} s")
    note(f"times: {', '.join(phases)}; ended by {result.finish_reason}")
    note(session.cache.describe())
