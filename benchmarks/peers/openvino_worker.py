"""The worker of OpenVINO GenAI: its paged pipeline, one step of which writes a token of each text.

The pipeline writes its own greedy tokens: `tg` takes as many steps, and what it is told to feed is not looked at. A
text can't be taken back, so the depth grows until `DRIFT` tokens were written, and then the text is read anew.
"""

from argparse import Namespace

import numpy as np
import openvino
import openvino_genai
from peers.openvino_weights import folder_of
from peers.shape import Shape
from peers.worker import About, Peer, options, serve

DRIFT = 256
SINKS, RECENT = 32, 128  # of its eviction; both have to be multiples of its blocks of 32 tokens


class OpenVino(Peer):
    """A continuous batching pipeline, and `batch` texts in it."""

    def __init__(self, shape: Shape, asked: Namespace) -> None:
        self.path = folder_of(shape, asked.weights)
        self.batch, self.budget = asked.batch, asked.budget
        settings = openvino_genai.SchedulerConfig()
        said = "paged, its own precisions"
        if asked.budget is not None:
            settings.use_cache_eviction = True
            settings.cache_eviction_config = openvino_genai.CacheEvictionConfig(
                SINKS, RECENT, asked.budget, openvino_genai.AggregationMode.NORM_SUM
            )
            said = f"NORM_SUM, start {SINKS}, recent {RECENT}, at most {asked.budget}"
        self.properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": asked.threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(self.path, settings, "CPU", self.properties)
        self.about = About("OpenVINO GenAI", openvino_genai.__version__, said, asked.threads)
        self.config = openvino_genai.GenerationConfig(max_new_tokens=2**20, ignore_eos=True, do_sample=False)
        self.handles: list[openvino_genai.GenerationHandle] = []
        self.requests, self.written, self.fed = 0, 0, [0]

    def hold(self, ids: list[int]) -> None:
        self.held = ids or [0]
        self._begin(self.held)

    def restore(self, room: int) -> None:
        is_stale = len(self.held) == 1 or (self.budget is None and self.written + room > DRIFT)
        if is_stale and self.written:
            self._begin(self.held)

    def feed(self, ids: list[int]) -> None:
        self.pipeline.step()
        self.written += 1

    def read(self, ids: list[int], size: int | None = None) -> None:
        """One by one; None: as new texts, until each has its first token."""
        self.fed = ids
        if size is None:
            if len(self.held) > 1:
                raise ValueError("OpenVINO's worker reads prompts at depth 0 only")
            self._begin(ids)
            self.written = 1
        else:
            super().read(ids, size)

    def logits(self) -> list[float]:
        """Of the same files, run without the pipeline, which gives out none."""
        model = openvino.Core().compile_model(self.path / "openvino_model.xml", "CPU", self.properties)
        request, tokens = model.create_infer_request(), len(self.fed)
        positions = np.arange(tokens)[None]
        given = {"input_ids": np.array([self.fed]), "attention_mask": np.ones_like(positions)}
        given |= {"position_ids": positions, "beam_idx": np.zeros(1, np.int32)}
        used = {name: given[name] for port in model.inputs for name in port.names if name in given}
        logits: list[float] = request.infer(used)["logits"][0, -1].tolist()
        return logits

    def _begin(self, ids: list[int]) -> None:
        """Forget all texts, and read `batch` new ones."""
        for handle in self.handles:
            handle.cancel()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self.handles, self.written = [], 0
        for _ in range(self.batch):
            tokens = openvino.Tensor(np.array([ids], np.int64))
            self.handles.append(self.pipeline.add_request(self.requests, tokens, self.config))
            self.requests += 1
        ready = 0
        while ready < self.batch:
            self.pipeline.step()
            ready = sum(handle.can_read() for handle in self.handles)


def main() -> None:
    """Serve."""
    shape, asked = options()
    serve(OpenVino(shape, asked), shape.vocabulary)


if __name__ == "__main__":
    main()
