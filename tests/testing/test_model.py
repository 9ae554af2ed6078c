from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graftlm.contracts import ForwardBatch, Model, ModelContext
from graftlm.testing.conformance import run_conformance
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm_models.llama import LlamaForCausalLM

Weights = Iterable[tuple[str, Tensor]]


class MixesRequests(LlamaForCausalLM):
    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = super().forward(batch)
        return hidden + hidden.mean(dim=0)


class CountsPositionsByStep(LlamaForCausalLM):
    def forward(self, batch: ForwardBatch) -> Tensor:
        return super().forward(replace(batch, positions=torch.arange(batch.num_tokens)))


class ListsALayerTwice(LlamaForCausalLM):
    @property
    def attention_layers(self):
        layers = super().attention_layers
        return [*layers, layers[-1]]


class IgnoresWrongTensors(LlamaForCausalLM):
    def load_weights(self, weights: Weights) -> None:
        known = {slot.name: slot for slot in self.weight_slots()}
        for name, tensor in weights:
            if name in known and tuple(tensor.shape) == known[name].shape:
                known[name].target.copy_(tensor)


class LoadsOnce(LlamaForCausalLM):
    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.is_loaded = False

    def load_weights(self, weights: Weights) -> None:
        if not self.is_loaded:
            super().load_weights(weights)
        self.is_loaded = True


class OverwritesATensor(LlamaForCausalLM):
    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights)
        self.norm.weight.fill_(1.0)


class ReturnsOneLogitRow(LlamaForCausalLM):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden[-1:])


class DeclaresTooManyLabels(LlamaForCausalLM):
    @property
    def num_labels(self) -> int:
        return 3

    def score(self, hidden: Tensor) -> Tensor:
        return hidden[:, :2]


class CapturesEmbeddings(LlamaForCausalLM):
    def forward_with_inputs(self, batch, layers):
        return self.forward(batch), [self.embed_tokens(batch.input_ids) for _ in layers]


def kit_for(create: Callable[[ModelContext], Model], folder: Path) -> type[ModelConformance]:
    class Kit(ModelConformance):
        def create(self, context: ModelContext) -> Model:
            return create(context)

        def checkpoint(self) -> Path:
            return folder

    return Kit


@pytest.mark.parametrize(
    ("faulty", "test", "arguments"),
    [
        (MixesRequests, "test_a_request_is_independent_of_the_batch", {"page_size": 4}),
        (CountsPositionsByStep, "test_chunks_give_what_the_whole_prompt_gives", {"page_size": 4, "chunk_len": 3}),
        (ListsALayerTwice, "test_attention_layers_are_listed_once", {}),
        (IgnoresWrongTensors, "test_a_missing_tensor_is_named", {}),
        (IgnoresWrongTensors, "test_a_surplus_tensor_is_named", {}),
        (IgnoresWrongTensors, "test_a_tensor_of_the_wrong_shape_is_named", {}),
        (LoadsOnce, "test_loading_sets_every_parameter", {}),
        (OverwritesATensor, "test_every_tensor_reaches_the_model", {}),
        (ReturnsOneLogitRow, "test_hidden_states_and_logits_have_their_shapes", {}),
        (DeclaresTooManyLabels, "test_a_head_gives_as_many_numbers_as_it_has_labels", {}),
        (CapturesEmbeddings, "test_captured_inputs_are_the_residual_stream", {"page_size": 4}),
        (IgnoresWrongTensors, "test_a_twin_without_memory_checks_what_the_model_checks", {}),
    ],
)
def test_the_kit_finds_a_faulty_model(
    faulty: Callable[[ModelContext], Model], test: str, arguments: dict[str, int], tmp_path: Path
) -> None:
    kit = kit_for(faulty, write_tiny_checkpoint(tmp_path, "llama", vocab_size=128))
    with pytest.raises(AssertionError):
        getattr(kit(), test)(**arguments)


def test_the_kit_runs_without_pytest(tmp_path: Path) -> None:
    kit = kit_for(LlamaForCausalLM, write_tiny_checkpoint(tmp_path, "llama", vocab_size=128))
    results = run_conformance(kit)
    assert len(results) > 10
    assert [result.name for result in results if result.error or result.skipped] == []
