"""Clients of an attached model, one function each: it builds a plain and an attached model in the same way."""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from clients.compare import MODEL, Compared, compare, plain_model
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model

import windlass
from windlass import KVCache

Case = Callable[[], Compared]


def _adapted(model: Any, config: Any) -> Any:
    """The model with an adapter whose weights are random: as they start, most adapters change nothing."""
    wrapped = get_peft_model(model, config).eval()
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if any(kind in name for kind in ("lora_", "ia3_", "prompt_encoder")):
            parameter.data.normal_(1.0 if "ia3_" in name else 0.0, 0.2)
    return wrapped


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
IA3 = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])


def _attach_first(config: Any) -> Compared:
    base = windlass.attach(plain_model())
    return compare(_adapted(plain_model(), config), _adapted(base, config), partial(KVCache, base))


def _attach_last(config: Any) -> Compared:
    ours = _adapted(plain_model(), config)
    windlass.attach(ours.get_base_model())
    return compare(_adapted(plain_model(), config), ours, partial(KVCache, ours.get_base_model()))


def _attach_wrapper() -> Compared:
    ours = windlass.attach(_adapted(plain_model(), LORA))
    return compare(_adapted(plain_model(), LORA), ours, partial(KVCache, ours))


def _merged(is_attached_first: bool) -> Compared:
    base = plain_model()
    if is_attached_first:
        windlass.attach(base)
    merged = _adapted(base, LORA).merge_and_unload()
    ours = windlass.attach(merged)
    return compare(_adapted(plain_model(), LORA).merge_and_unload(), ours, partial(KVCache, ours))


def _disabled() -> Compared:
    base = windlass.attach(plain_model())
    ours = _adapted(base, LORA)
    with ours.disable_adapter():
        return compare(plain_model(), ours, partial(KVCache, base))


def _prefix() -> Compared:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    return _attach_first(config)


def _torchao(is_attached_first: bool) -> Compared:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    plain, ours = plain_model(), plain_model()
    if is_attached_first:
        windlass.attach(ours)
    quantize_(plain, Int8WeightOnlyConfig())
    quantize_(ours, Int8WeightOnlyConfig())
    windlass.attach(ours)
    return compare(plain, ours, partial(KVCache, ours))


def _bitsandbytes() -> Compared:
    from transformers import BitsAndBytesConfig

    load = partial(plain_model, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="cpu")
    ours = windlass.attach(load())
    return compare(load(), ours, partial(KVCache, ours))


def _on_disk() -> Compared:
    """The first layers in memory, the others read from disk whenever they are used."""
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(MODEL).num_hidden_layers
    places = {f"model.layers.{layer}": "cpu" if layer < layers // 2 else "disk" for layer in range(layers)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    with tempfile.TemporaryDirectory() as folder:
        ours = windlass.attach(plain_model(device_map=places, offload_folder=folder))
        return compare(plain_model(), ours, partial(KVCache, ours))


def _device_map_auto() -> Compared:
    ours = windlass.attach(plain_model(device_map="auto"))
    return compare(plain_model(), ours, partial(KVCache, ours))


def _prepared() -> Compared:
    from accelerate import Accelerator

    ours = windlass.attach(Accelerator(cpu=True).prepare(plain_model()))
    return compare(plain_model(), ours, partial(KVCache, ours))


def _offloaded(to_disk: bool, is_attached_first: bool) -> Compared:
    """The whole model: its parameters are on the meta device between passes."""
    from accelerate import cpu_offload, disk_offload

    with tempfile.TemporaryDirectory() as folder:
        ours = plain_model()
        if is_attached_first:
            windlass.attach(ours)
        if to_disk:
            disk_offload(ours, folder, execution_device=torch.device("cpu"))
        else:
            cpu_offload(ours, execution_device=torch.device("cpu"))
        windlass.attach(ours)
        return compare(plain_model(), ours, partial(KVCache, ours))


def _compiled_layers() -> Compared:
    ours = windlass.attach(plain_model())
    for layer in ours.model.layers:
        layer.compile(backend="eager")
    return compare(plain_model(), ours, partial(KVCache, ours))


def _compiled(backend: str) -> Compared:
    ours = windlass.attach(plain_model())
    ours.compile(backend=backend)
    return compare(plain_model(), ours, partial(KVCache, ours))


def _harness(rows: int, has_cache: bool) -> Compared:
    from clients.harness import answers_equal

    return answers_equal(rows, has_cache)


CASES: Final[dict[str, Case]] = {
    "transformers alone": lambda: compare(plain_model(), *_attached()),
    "PEFT LoRA, the base attached before": partial(_attach_first, LORA),
    "PEFT LoRA, the base attached after": partial(_attach_last, LORA),
    "PEFT LoRA, the PeftModel attached": _attach_wrapper,
    "PEFT LoRA, attached, then merged": partial(_merged, True),
    "PEFT LoRA, merged, then attached": partial(_merged, False),
    "PEFT LoRA, `disable_adapter`": _disabled,
    "PEFT IA3, attached before": partial(_attach_first, IA3),
    "PEFT IA3, attached after": partial(_attach_last, IA3),
    "PEFT prefix tuning": _prefix,
    "torchao int8 weights, attached before": partial(_torchao, True),
    "torchao int8 weights, attached after": partial(_torchao, False),
    "bitsandbytes 8 bit": _bitsandbytes,
    "accelerate `device_map`, half of the layers on disk": _on_disk,
    'accelerate `device_map="auto"`': _device_map_auto,
    "accelerate `Accelerator.prepare`": _prepared,
    "accelerate `cpu_offload` of the whole model, attached before": partial(_offloaded, False, True),
    "accelerate `cpu_offload` of the whole model, attached after": partial(_offloaded, False, False),
    "accelerate `disk_offload` of the whole model, attached after": partial(_offloaded, True, False),
    "`torch.compile` of the layers": _compiled_layers,
    "`torch.compile` of the model, backend eager": partial(_compiled, "eager"),
    "`torch.compile` of the model, backend inductor": partial(_compiled, "inductor"),
    "lm-evaluation-harness, batch 1, no cache": partial(_harness, 1, False),
    "lm-evaluation-harness, batch 4, no cache": partial(_harness, 4, False),
    "lm-evaluation-harness, batch 1, a `KVCache`": partial(_harness, 1, True),
    "lm-evaluation-harness, batch 4, a `KVCache`": partial(_harness, 4, True),
}


def _attached() -> tuple[Any, Callable[..., KVCache]]:
    ours = windlass.attach(plain_model())
    return ours, partial(KVCache, ours)
