"""Triton's interpreter, for tests that run kernels on a CPU."""

import dataclasses

import pytest
from triton.runtime import interpreter


def interpret_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the parts that take the interpreter three quarters of its time."""
    patched: set[str] = set()

    def call(function: interpreter.InterpretedFunction, *args: object, **options: object) -> object:
        if function.fn.__module__ not in patched:  # once, and not at every call
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **options)

    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(builder, "options", options)
