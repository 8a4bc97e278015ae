"""The documents of `/v1/responses`: one answer, and the events of its stream."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from windlass.engine.request import Piece
from windlass.serve.chat import AnswerDocuments, AnswerHeader, PartialText, usage_of
from windlass.serve.errors import ApiError, named_event
from windlass.serve.items import ResponsesRequest
from windlass.serve.parsers import Call, TextPart

FAILURE: Final = ("code", "message", "param")
THOUGHT: Final = "reasoning"
MESSAGE: Final = "message"
EVENTS: Final = {THOUGHT: "reasoning_text", MESSAGE: "output_text"}  # prefixes of the names of events about a text
MORE: Final[dict[str, dict[str, Any]]] = {  # further fields of an event and of a part, beside the text
    THOUGHT: {},
    MESSAGE: {"logprobs": []},
}


@final
class ResponseDocuments(AnswerDocuments):
    """`response`, and its events, which are numbered. Nothing of it is stored: `store` is false.

    The thought, the message and each function call of an answer are items. An answer without any of them has an empty
    message.
    """

    def __init__(self, head: AnswerHeader, body: ResponsesRequest) -> None:
        self.head, self._events = head, 0
        self._begun: list[str] = []  # kinds of items that a stream has begun, the last of them unfinished
        self._thought = ""
        self._echoed = body.echoed

    def opening(self, at: int) -> list[dict[str, Any]]:
        begun = self._response("in_progress", [])
        return [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]

    def deltas(self, at: int, said: TextPart, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        self._thought += said.thought
        for kind, piece in ((THOUGHT, said.thought), (MESSAGE, said.text)):
            if piece:
                found += self._begin(kind)
                found.append(self._event(kind, "delta", {"delta": piece}))
        return found

    def closing(self, at: int, written: PartialText) -> list[dict[str, Any]]:
        items = self._items(written)
        found = self._begin(MESSAGE) if not self._begun and items[0]["type"] == MESSAGE else []
        if self._begun:
            found += self._done(items[len(self._begun) - 1])
        for index, item in enumerate(items[len(self._begun) :], len(self._begun)):
            place = {"item_id": item["id"], "output_index": index}
            begun = {**item, "status": "in_progress", "arguments": ""}
            name = "response.function_call_arguments"
            found += [
                {"type": "response.output_item.added", "output_index": index, "item": begun},
                {"type": f"{name}.delta", **place, "delta": item["arguments"]},
                {"type": f"{name}.done", **place, "name": item["name"], "arguments": item["arguments"]},
                {"type": "response.output_item.done", "output_index": index, "item": item},
            ]
        return found

    def ending(self, texts: Sequence[PartialText]) -> bytes:
        done = self.answer(texts)
        return self.wire({"type": f"response.{done['status']}", "response": done})

    def failure(self, error: ApiError) -> bytes:
        """A response that failed, which agents read, and the error, which other clients do."""
        told = {name: error.document()["error"][name] for name in FAILURE}
        failed = self._response("failed", []) | {"error": {"code": told["code"], "message": told["message"]}}
        return self.wire({"type": "response.failed", "response": failed}) + self.wire({"type": "error", **told})

    def wire(self, document: dict[str, Any]) -> bytes:
        numbered = {**document, "sequence_number": self._events}
        self._events += 1
        return named_event(document["type"], numbered)

    def answer(self, texts: Sequence[PartialText]) -> dict[str, Any]:
        [written] = texts
        status = _status(written)
        taken = usage_of([written.usage], 1, self.head.options, self.head.left_out)
        usage = {
            "input_tokens": taken["prompt_tokens"],
            "input_tokens_details": taken["prompt_tokens_details"],
            "output_tokens": taken["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": written.thought_tokens},
            "total_tokens": taken["total_tokens"],
            "windlass": taken["windlass"],
        }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, self._items(written)) | {"usage": usage, "incomplete_details": why}

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
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **self._echoed,
        }

    def _items(self, written: PartialText) -> list[dict[str, Any]]:
        """Return all items of a text. Where the text is cut, the last item is incomplete."""
        texts = [(THOUGHT, written.thought)] if written.thought else []
        if written.text or not (written.thought or written.called):
            texts.append((MESSAGE, written.text))
        items = [self._item(kind, "completed", [_part_of_answer(kind, text)]) for kind, text in texts]
        items += [self._call(number, call) for number, call in enumerate(written.called)]
        items[-1]["status"] = _status(written)
        return items

    def _item(self, kind: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        own: dict[str, Any] = {"summary": []} if kind == THOUGHT else {"role": "assistant"}
        return {"id": self._id(kind), "type": kind, **own, "status": status, "content": content}

    def _id(self, kind: str) -> str:
        return f"{'rs' if kind == THOUGHT else 'msg'}_{self.head.number}"

    def _call(self, number: int, call: Call) -> dict[str, Any]:
        item = {"id": f"fc_{self.head.number}_{number}", "type": "function_call", "status": "completed"}
        return {**item, "call_id": call.id, "name": call.name, "arguments": call.arguments}

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        """Return the events that end the item before and begin one of this kind, or none if it has begun."""
        if kind in self._begun:
            return []
        found = (
            self._done(self._item(THOUGHT, "completed", [_part_of_answer(THOUGHT, self._thought)]))
            if self._begun
            else []
        )
        self._begun.append(kind)
        item = {"output_index": len(self._begun) - 1, "item": self._item(kind, "in_progress", [])}
        return [
            *found,
            {"type": "response.output_item.added", **item},
            {"type": "response.content_part.added", **self._place(kind), "part": _part_of_answer(kind, "")},
        ]

    def _done(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """The last item that has begun is over."""
        kind, [part] = item["type"], item["content"]
        return [
            self._event(kind, "done", {"text": part["text"]}),
            {"type": "response.content_part.done", **self._place(kind), "part": part},
            {"type": "response.output_item.done", "output_index": len(self._begun) - 1, "item": item},
        ]

    def _event(self, kind: str, what: str, text: Mapping[str, str]) -> dict[str, Any]:
        return {"type": f"response.{EVENTS[kind]}.{what}", **self._place(kind), **text, **MORE[kind]}

    def _place(self, kind: str) -> dict[str, Any]:
        return {"item_id": self._id(kind), "output_index": self._begun.index(kind), "content_index": 0}


def _part_of_answer(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {} if kind == THOUGHT else {"annotations": []}
    return {"type": EVENTS[kind], "text": text, **more, **MORE[kind]}


def _status(written: PartialText) -> str:
    return "incomplete" if written.reason == "length" else "completed"
