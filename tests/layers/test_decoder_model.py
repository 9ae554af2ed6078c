from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

from graftlm.contracts import AttentionLayer, ForwardBatch, ModelConfig, ModelContext
from graftlm.errors import RequestError, WeightError
from graftlm.layers import Attention, DecoderLayer, DecoderModel, DecoderShape, Linear, RMSNorm, WeightSlot

CPU, SIZE = torch.device("cpu"), 8
RAW = {
    "architectures": ["TinyForCausalLM"],
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "max_position_embeddings": 16,
    "num_attention_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 5,
}
TENSORS = {
    "model.embed_tokens.weight": torch.randn(5, SIZE),
    "model.layers.0.proj.weight": torch.randn(SIZE, SIZE),
    "model.layers.1.proj.weight": torch.randn(SIZE, SIZE),
    "model.norm.weight": torch.randn(SIZE),
}
LM_HEAD = torch.randn(5, SIZE)


class TinyLayer(DecoderLayer):
    """Attends in a sub-module of the layer."""

    def __init__(self, shape: DecoderShape, layer_id: int) -> None:
        super().__init__()
        self.proj = Linear(SIZE, {"proj": SIZE}, device=CPU, dtype=torch.float32)
        self.mixer = nn.ModuleDict({"attend": Attention(shape.attention_layer(layer_id))})

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.proj.weight_slots(prefix)


class TinyModel(DecoderModel):
    """Drops the tensors whose names start with "draft."."""

    def __init__(self, *, tied: bool) -> None:
        raw = {**RAW, "tie_word_embeddings": tied}
        config = ModelConfig(("TinyForCausalLM",), vocab_size=5, max_position_embeddings=16, raw=raw)
        shape, context = DecoderShape.from_config(config), ModelContext(config, CPU, torch.float32)
        layers = (TinyLayer(shape, layer_id) for layer_id in range(shape.num_layers))
        super().__init__(shape, context, layers, RMSNorm(SIZE, shape.eps, device=CPU, dtype=torch.float32))

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.embed(batch.input_ids)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in weights if not name.startswith("draft."))


class Backend:
    """Records the layers that it is called for."""

    def __init__(self) -> None:
        self.calls: list[AttentionLayer] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        self.calls.append(layer)
        return q


def loaded(*, tied: bool) -> TinyModel:
    model = TinyModel(tied=tied)
    model.load_weights([*TENSORS.items(), *([] if tied else [("lm_head.weight", LM_HEAD)])])
    return model


@pytest.mark.parametrize(("tied", "output"), [(False, LM_HEAD), (True, TENSORS["model.embed_tokens.weight"])])
def test_every_weight_can_be_read_and_logits_use_the_output_projection(tied: bool, output: Tensor) -> None:
    model = loaded(tied=tied)
    for name, tensor in {**TENSORS, "lm_head.weight": output}.items():
        assert torch.equal(model.read_weight(name), tensor)
    hidden = torch.randn(3, SIZE)
    torch.testing.assert_close(model.logits(hidden), hidden @ output.T)
    model.pack_weights()
    torch.testing.assert_close(model.logits(hidden), hidden @ output.T)


def test_an_update_replaces_only_the_given_tensors() -> None:
    model, new = loaded(tied=False), torch.randn(SIZE, SIZE)
    model.update_weights([("model.layers.1.proj.weight", new), ("draft.weight", new)])
    assert torch.equal(model.read_weight("model.layers.1.proj.weight"), new)
    assert torch.equal(model.read_weight("model.layers.0.proj.weight"), TENSORS["model.layers.0.proj.weight"])


def test_missing_and_unknown_tensors_are_refused_and_dropped_ones_ignored() -> None:
    model = TinyModel(tied=False)
    with pytest.raises(WeightError, match=r"lacks 'lm_head\.weight'"):
        model.load_weights(TENSORS.items())
    with pytest.raises(WeightError, match=r"model\.layers\.2"):
        model.update_weights([("model.layers.2.proj.weight", torch.zeros(SIZE, SIZE))])
    with pytest.raises(RequestError, match="draft"):
        model.read_weight("draft.weight")
    model.load_weights([*TENSORS.items(), ("lm_head.weight", LM_HEAD), ("draft.weight", LM_HEAD)])


def test_attention_at_any_depth_of_a_layer_is_listed_and_bound() -> None:
    model, backend = TinyModel(tied=True), Backend()
    assert [layer.layer_id for layer in model.attention_layers] == [0, 1]
    model.bind_attention(backend)  # type: ignore[arg-type]
    q = torch.zeros(1, 1, SIZE)
    for module in model.modules():
        if isinstance(module, Attention):
            module(q, q, q)
    assert backend.calls == list(model.attention_layers)
