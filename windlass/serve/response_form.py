"""The documents of `/v1/responses`: one answer, and the events of its stream."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from windlass.engine.request import Piece
from windlass.serve.errors import ApiError
from windlass.serve.forms import Form, Head, Written
from windlass.serve.thoughts import Said
from windlass.serve.usage import usage_of
from windlass.serve.wire import named_event

ECHOED: Final = {"instructions": None, "temperature": 1.0, "top_p": 1.0, "max_output_tokens": None, "user": None}


@final
class ResponseForm(Form):
    """`response`, and its events, which are numbered. Nothing of it is kept: `store` is false."""

    def __init__(self, head: Head, given: Mapping[str, Any]) -> None:
        self.head, self._events = head, 0
        self._item_id = f"msg_{head.number}"
        self._echoed = {name: given.get(name, default) for name, default in ECHOED.items()}
        self._format = given.get("text", {}).get("format", {"type": "text"})

    def opening(self, at: int) -> list[dict[str, Any]]:
        begun = self._response("in_progress", [])
        item = {"output_index": at, "item": self._item("in_progress", [])}
        part = self._part(at) | {"part": _text("")}
        return [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            {"type": "response.output_item.added", **item},
            {"type": "response.content_part.added", **part},
        ]

    def delta(self, at: int, said: Said, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        return {"type": "response.output_text.delta", **self._part(at), "delta": said.text, "logprobs": []}

    def closing(self, at: int, written: Written) -> list[dict[str, Any]]:
        item = {"output_index": at, "item": self._item(_status(written), [_text(written.text)])}
        return [
            {"type": "response.output_text.done", **self._part(at), "text": written.text, "logprobs": []},
            {"type": "response.content_part.done", **self._part(at), "part": _text(written.text)},
            {"type": "response.output_item.done", **item},
        ]

    def ending(self, texts: Sequence[Written]) -> bytes:
        done = self.answer(texts)
        return self.wire({"type": f"response.{done['status']}", "response": done})

    def failure(self, error: ApiError) -> bytes:
        return self.wire({"type": "error", **{name: error.document()["error"][name] for name in FAILURE}})

    def wire(self, document: dict[str, Any]) -> bytes:
        numbered = {**document, "sequence_number": self._events}
        self._events += 1
        return named_event(document["type"], numbered)

    def answer(self, texts: Sequence[Written]) -> dict[str, Any]:
        [written] = texts
        status = _status(written)
        taken = usage_of([written.usage], 1, self.head.options)
        usage = {
            "input_tokens": taken["prompt_tokens"],
            "input_tokens_details": taken["prompt_tokens_details"],
            "output_tokens": taken["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": taken["total_tokens"],
            "windlass": taken["windlass"],
        }
        output = [self._item(status, [_text(written.text)])]
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, output) | {"usage": usage, "incomplete_details": why}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self.head.number}",
            "object": "response",
            "created_at": self.head.created,
            "model": self.head.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": self._format},
            "tool_choice": "none",
            "tools": [],
            "truncation": "disabled",
            "metadata": {},
            "usage": None,
            **self._echoed,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, at: int) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": at, "content_index": 0}


FAILURE: Final = ("code", "message", "param")


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(written: Written) -> str:
    return "incomplete" if written.reason == "length" else "completed"
