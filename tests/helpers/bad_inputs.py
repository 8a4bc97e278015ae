"""Bad and odd inputs of the command line as data: arguments, and the content of their one line of error.

In braces stand places that the tests make: `{model}` works, `{folder}` is empty, `{text}` is a text, and so on.
"""

from collections.abc import Iterator
from typing import Any

import typer

from tests.helpers.bad_files import FILES
from windlass.cli.app import app
from windlass.cli.measure_options import RAY
from windlass.cli.options import BareOptionCommand

# Arguments that a command needs beside the tested option.
WORKING = {
    "generate": "{model} hi",
    "chat": "{model}",
    "cache": "{model} hi --prompt-cache {new}",
    "bench": "--shape tiny",
    "eval": "{model} -o {new}",
    "calibrate": "{model} {text} -o {new}",
    "report": "{text}",
    "demo": "--model finder-3m",
    "policies": "",
}
NO_NUMBERS = ("x", "", "1,5", "½")
NO_WHOLE_NUMBERS = ("nan", "1.5")

# command, options, a regular expression for the error
NUMBERS = [
    ("generate", "--budget 0", "budget must be from 1 to 1073741824, got 0"),
    ("generate", "--budget -3", "budget must be from 1"),
    ("generate", "--budget 99999999999999999999", "budget must be from 1"),
    ("generate", "--max-kv-size 0", "budget must be from 1"),
    ("generate", "--budget 3", r"budget \(3 tokens\) must be at least sinks \(4\)"),
    ("generate", "--budget 8 --window 4", r"budget \(8 tokens\) must be at least sinks \(4\) \+ window \(4\) \+ 1"),
    ("generate", "--budget 8 --sinks 8", r"must be at least sinks \(8\)"),
    ("generate", "--budget 64 --budget 0", "budget must be from 1"),
    ("generate", "--sinks -1", "sinks must be from 0"),
    ("generate", "--sinks 1073741825", "sinks must be from 0"),
    ("generate", "--window 0", "window must be from 1"),
    ("generate", "--window -8", "window must be from 1"),
    ("generate", "--chunk 0", "chunk must be from 1"),
    ("generate", "--chunk -1", "chunk must be from 1"),
    ("generate", "--chunk 4294967296", "chunk must be from 1"),
    ("generate", "-n 0", "max_tokens must be from 1 to .*, got 0"),
    ("generate", "--max-tokens -5", "max_tokens must be from 1"),
    ("generate", "--temperature nan", "temperature must be from 0 to 100, got nan"),
    ("generate", "--temperature -1", "temperature must be from 0"),
    ("generate", "--temperature inf", "temperature must be from 0"),
    ("generate", "--temperature 101", "temperature must be from 0"),
    ("generate", "--top-k -1", "top_k must be from 0"),
    ("generate", "--top-p 0", "top_p must be above 0"),
    ("generate", "--top-p 1.01", "top_p must be above 0 and at most 1"),
    ("generate", "--top-p nan", "top_p must be above 0"),
    ("generate", "--min-p -0.1", "min_p must be from 0 to 1"),
    ("generate", "--min-p 2", "min_p must be from 0 to 1"),
    ("generate", "--min-p nan", "min_p must be from 0 to 1"),
    ("generate", "--repetition-penalty 0", "repetition_penalty must be above 0"),
    ("generate", "--repetition-penalty -1", "repetition_penalty must be above 0"),
    ("generate", "--repetition-penalty inf", "repetition_penalty must be above 0"),
    ("generate", "--seed -1", "seed must be from 0"),
    ("generate", "--seed 9223372036854775808", "seed must be from 0"),
    ("generate", "--threads 0", "--threads"),
    ("generate", "--threads 100000", "--threads"),
    ("chat", "-n 0", "max_tokens must be from 1"),
    ("chat", "--temperature nan", "temperature must be"),
    ("chat", "--budget 0", "budget must be"),
    ("cache", "--budget -1", "budget must be"),
    ("cache", "--chunk 0", "chunk must be"),
    ("demo", "--depth 2", "--depth"),
    ("demo", "--depth -0.1", "--depth"),
    ("demo", "--depth nan", "--depth"),
    ("demo", "--budget 0", "budget must be from 1"),
    ("demo", "--budget 5", "budget .5 tokens. must be at least"),
    ("demo", "--threads 0", "--threads"),
    ("demo", "--seed -1", "--seed"),
    ("bench", "--layers 0", "--layers"),
    ("bench", "--layers 99999", "--layers"),
    ("bench", "-r 0", "--repetitions"),
    ("bench", "--chunk 0", "chunk must be from 1"),
    ("bench", "-p -1", "-p '-1' is not a whole number"),
    ("bench", "-p 1.5", "-p '1.5' is not a whole number"),
    ("bench", "-p 1,,2", "-p '1,,2' has an empty value"),
    ("bench", "-p ,", "has an empty value"),
    ("bench", "-n nan", "-n 'nan' is not a whole number"),
    ("bench", "-p 0 -n 0", "leave nothing to measure"),
    ("bench", "-d -1", "-d '-1' is not a whole number"),
    ("bench", "-d 99999999999", "-d '99999999999' is not a whole number"),
    ("bench", "--batch 0", "--batch '0' is not a whole number from 1"),
    ("bench", "--threads 0", "--threads '0' is not a whole number"),
    ("bench", "--threads x", "--threads 'x' is not a whole number"),
    ("bench", "--budget 0", "--budget '0' is not a whole number"),
    ("bench", "--budget 0.5x", "--budget '0.5x' is not a part of the text"),
    ("bench", "--budget 5", "budget .5 tokens. must be at least"),
    ("eval", "--samples 0", "--samples"),
    ("eval", "--batch 0", "--batch"),
    ("eval", "--lengths 0", "--lengths '0' is not a whole number"),
    ("eval", "--lengths 1e3", "--lengths '1e3' is not a whole number"),
    ("eval", "--budgets 0", "--budgets '0' is not a whole number"),
    ("eval", "--budgets 0x", "--budgets '0x' is not a part of the text"),
    ("eval", "--budgets most", "--budgets 'most' is not a whole number"),
    ("eval", "--budgets all,", "--budgets 'all,' has an empty value"),
    ("eval", "--depth 2", "--depth '2' is not a part of the text"),
    ("eval", "--depth 50%", "--depth '50%' is not a part of the text"),
    ("eval", "--depth 0,", "--depth '0,' has an empty value"),
    ("eval", "--seed -1", "--seed"),
    ("calibrate", "--tokens 0", "--tokens"),
    ("calibrate", "--tokens -1", "--tokens"),
]
NAMES = [
    ("generate", "--policy snapvk", r"policy 'snapvk' is unknown. Did you mean snapkv\?"),
    ("generate", "--policy ''", "policy '' cannot be read"),
    ("generate", "--policy 'snapkv('", "cannot be read"),
    ("generate", "--policy 'snapkv)('", "cannot be read"),
    ("generate", "--policy 'snapkv(,)'", "cannot be read"),
    ("generate", "--policy 'a b'", "cannot be read"),
    ("generate", "--policy Récent", "is unknown"),
    ("generate", "--policy 42", "policy '42' is unknown"),
    ("generate", "--policy None", "policy 'None' is unknown"),
    (
        "generate",
        "--policy 'snapkv(poll=7)'",
        "unexpected keyword argument 'poll'. It takes snapkv.observed_queries: int",
    ),
    (
        "generate",
        "--policy 'snapkv(1, 3, True, 5)'",
        "takes from 1 to 4 positional arguments but 5 were given. It takes snapkv",
    ),
    ("generate", "--policy 'SnapKV(pool=1e400)'", "pool must be an odd number of at least 1, got inf"),
    ("generate", "--policy 'SnapKV(pool=-1e999)'", "pool must be an odd number of at least 1, got -inf"),
    ("generate", "--policy 'SnapKV(pool=nan)'", "policy 'nan' is unknown"),
    ("generate", "--policy 'pyramid(snapvk)'", "policy 'snapvk' is unknown"),
    ("generate", "--policy 'pyramid(snapkv, gamma=3)'", "unexpected keyword argument 'gamma'. It takes pyramid"),
    (
        "generate",
        "--policy 'pairs({missing})'",
        "cannot be read: No such file .*. Make it again with `windlass calibrate`",
    ),
    ("generate", "--policy {missing}.py:Mine", "policy file .* cannot be read: No such file"),
    ("generate", "--policy {missing}.py", "is a file but names no class"),
    ("generate", "--policy {folder}:Mine", "cannot be read: Is a directory"),
    ("generate", "--policy /dev/zero:Mine", "is not a regular file, nor a pipe"),
    ("generate", "--positions compcat", "is not a position mode. Use one of: .*compact, self_extend.group, window."),
    ("generate", "--positions Compact", "is not a position mode"),
    ("generate", "--positions ''", "is not a position mode"),
    ("generate", "--positions 'compact(3)'", "compact takes no numbers"),
    ("generate", "--positions 'clamp(0)'", "limit must be from 1"),
    ("generate", "--positions 'clamp()'", "clamp takes a limit"),
    ("generate", "--positions clamp", "clamp takes a limit"),
    ("generate", "--positions 'clamp(x)'", "limit must be a whole number, got 'x'"),
    ("generate", "--positions 'clamp(1.5)'", "limit must be a whole number"),
    ("generate", "--positions 'clamp(1, 2)'", "clamp takes limit, each once"),
    ("generate", "--positions 'clamp(limit=1, limit=2)'", "clamp takes limit, each once"),
    ("generate", "--positions 'self_extend(0, 64)'", "group must be from 1"),
    ("generate", "--positions 'self_extend(8, 0)'", "window must be from 1"),
    ("generate", "--positions 'self_extend(8, -1)'", "window must be from 1"),
    ("generate", "--positions 'self_extend(8, 64, 2)'", "self_extend takes group and window"),
    ("generate", "--positions 'self_extend(99999999999)'", "group must be from 1"),
    ("generate", "--store int3", "store='int3' is not a store"),
    ("generate", "--store INT8", "is not a store. Use one of: plain, int8, int4"),
    ("generate", "--store ''", "is not a store"),
    ("generate", "--store 'plain(1)'", "plain takes no numbers"),
    ("generate", "--store 'int4(sinks=-1)'", "sinks of a store must be from 0"),
    ("generate", "--store 'int4(newest=x)'", "newest must be a whole number"),
    ("generate", "--store 'int4(1, 2, 3)'", "int4 takes sinks and newest"),
    ("generate", "--store 'int4(newest=1, newest=2)'", "each once"),
    ("generate", "--merge meen", "merge='meen' is not a rule. Use one of: mean_count, mean"),
    ("generate", "--merge ''", "is not a rule"),
    ("generate", "--merge 'mean(far)'", "'far' is not a setting. Use one of: nearest, next"),
    ("generate", "--dtype fp16", "dtype 'fp16' is unknown. Use one of: auto, float32, bfloat16, float16"),
    ("generate", "--dtype Float32", "dtype 'Float32' is unknown"),
    ("generate", "--dtype ''", "dtype '' is unknown"),
    ("generate", "--weights int2", "weights 'int2' are unknown. Use one of: auto, int8, int4"),
    ("generate", "--device gpu", "device 'gpu' is unknown"),
    ("generate", "--device CPU", "device 'CPU' is unknown"),
    ("generate", "--device cuda:", "device 'cuda:' is unknown"),
    ("generate", "--device cuda:-1", "device 'cuda:-1' is unknown"),
    ("generate", "--device ''", "device '' is unknown"),
    ("chat", "--policy nope", "policy 'nope' is unknown"),
    ("chat", "--store int2", "is not a store"),
    ("cache", "--positions nope", "is not a position mode"),
    ("cache", "--merge nope", "is not a rule"),
    ("cache", "--dtype int8", "dtype 'int8' is unknown"),
    ("calibrate", "--dtype int8", "dtype 'int8' is unknown"),
    ("calibrate", "--weights fp8", "weights 'fp8' are unknown"),
    ("calibrate", "--device tpu", "device 'tpu' is unknown"),
    ("demo", "--policy nope", "policy 'nope' is unknown"),
    ("bench", "--policy nope", "policy 'nope' is unknown"),
    ("bench", "--policy recent,,h2o", "has an empty value"),
    ("bench", "--positions nope", "is not a position mode"),
    ("bench", "--store plain,int5", "store='int5' is not a store"),
    ("bench", "--storage both", "--storage 'both' is unknown. Use one of: unrotated, rotated"),
    ("bench", "--graph maybe", "--graph 'maybe' is unknown. Use one of: off, on"),
    ("bench", "--dtype fp8", "dtype 'fp8' is unknown"),
    ("bench", "--weights plain", "weights 'plain' are unknown"),
    ("bench", "--device moon", "device 'moon' is unknown"),
    ("bench", "--shape 2b", "give either a model or --shape|--shape '2b' is unknown. Use one of: tiny, 1b"),
    ("bench", "{model}", "give either a model or --shape"),
    ("eval", "--tasks pasky", r"task 'pasky' is unknown. Did you mean passkey\?"),
    ("eval", "--tasks ''", "has an empty value"),
    ("eval", "--tasks 'passkey({text})'", "task passkey reads no text"),
    ("eval", "--tasks 'perplexity({missing})'", "cannot be read: No such file"),
    ("eval", "--tasks {missing}.py:Mine", "cannot be read: No such file"),
    ("eval", "--tasks {missing}.py", "is a file but names no class"),
    ("eval", "--policies recent,nope", "policy 'nope' is unknown"),
    ("eval", "--merge nope", "is not a rule"),
    ("eval", "--positions compact,nope", "is not a position mode"),
    ("eval", "--store nope", "is not a store"),
    ("eval", "--weights 8", "weights '8' are unknown"),
    ("eval", "--dtype nope", "dtype 'nope' is unknown"),
]


def command_lines() -> Iterator[tuple[str, str]]:
    """Values that are refused before weights are loaded: the arguments after `windlass`, and their line of error."""
    for command, options, says in (*NUMBERS, *NAMES):
        yield f"{command} {WORKING[command]} {options}", says
    yield from FILES


def light_lines() -> Iterator[tuple[str, str]]:
    """Command lines that are refused without torch.

    Each option of each command without its value, with numbers that are none, and an unknown option.
    """
    commands: Any = typer.main.get_command(app)
    for name, command in commands.commands.items():
        start = f"{name} {WORKING.get(name, '')}"
        yield f"{start} --frob", "No such option: --frob"
        yield f"{start} --frob=1 --json", "No such option: --frob"
        for option in command.params:
            flag = max((each for each in option.opts if each.startswith("-")), key=len, default="")
            if not flag or option.is_flag:
                continue
            if (
                isinstance(command, BareOptionCommand) and flag in command.alone
            ):  # its value is a number or a word, see test_recall_alone.py
                continue
            if flag != RAY:  # it may stand alone
                yield f"{start} {flag}", f"{flag}' requires an argument"
            kind = option.type_descriptor.annotation
            if kind in (int, float):
                wrong = NO_NUMBERS + (NO_WHOLE_NUMBERS if kind is int else ())
                yield from ((f"{start} {flag} '{value}'", flag) for value in wrong)
