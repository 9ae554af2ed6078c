"""The conformance kit for models."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from graftlm.checkpoint import iter_weights, load_model_config
from graftlm.contracts import Model, ModelContext
from graftlm.errors import WeightError
from graftlm.testing.conformance import Conformance
from graftlm.testing.paged_model import PagedModel, Tokens

__all__ = ["ModelConformance"]

#: Token ids of the tests. All are below 100, so the vocabulary of a checkpoint needs at least 100 tokens.
_PROMPT = (17, 4, 99, 23, 23, 5, 61, 88, 2, 40, 7)


class ModelConformance(Conformance, ABC):
    """The kit for the contract `Model`, on a CPU in float32.

        class TestMyModel(ModelConformance):
            def create(self, context):
                return MyModel(context)

            def checkpoint(self):
                return Path("a folder with a small checkpoint")

    Attributes:
        parameters: `page_size` is the number of tokens in a page; `chunk_len` is the number of tokens in a chunk of a
            prompt.
        tolerance: largest difference of hidden states that rounding may cause, relative to the largest absolute value.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"page_size": (1, 4), "chunk_len": (1, 3, 8)}
    tolerance: ClassVar[float] = 1e-4

    @abstractmethod
    def create(self, context: ModelContext) -> Model:
        """Return a new model without weights."""

    @abstractmethod
    def checkpoint(self) -> Path:
        """Return the folder of a small checkpoint, in which every tensor must have an effect on the logits."""

    def model(self, weights: Iterable[tuple[str, Tensor]] | None = None) -> Model:
        """Return a new model with `weights` loaded; None: with the checkpoint's weights."""
        context = ModelContext(load_model_config(self.checkpoint()), torch.device("cpu"), torch.float32)
        model = self.create(context)
        model.load_weights(self.weights().items() if weights is None else weights)
        model.pack_weights()
        return model

    def weights(self) -> dict[str, Tensor]:
        """Return the checkpoint's tensors by name."""
        return dict(iter_weights(self.checkpoint()))

    def test_a_request_is_independent_of_the_batch(self, page_size: int) -> None:
        """A request's hidden states depend only on its own tokens, not on the rest of the batch."""
        prompts = (_PROMPT, _PROMPT[3:4], _PROMPT[5:], _PROMPT[::-1])
        together = PagedModel(self.model(), page_size=page_size)
        hidden = together.step([Tokens(row, prompt) for row, prompt in enumerate(prompts)])
        for row, prompt in enumerate(prompts):
            alone = PagedModel(self.model(), page_size=page_size, seed=1).step([Tokens(0, prompt)])
            self._assert_close(hidden[row], alone[0])

    def test_chunks_give_what_the_whole_prompt_gives(self, page_size: int, chunk_len: int) -> None:
        """A prompt in chunks gives the same hidden states as the whole prompt in one step."""
        whole = PagedModel(self.model(), page_size=page_size).run_in_chunks(_PROMPT, len(_PROMPT))
        chunked = PagedModel(self.model(), page_size=page_size).run_in_chunks(_PROMPT, chunk_len)
        self._assert_close(chunked, whole)

    def test_hidden_states_and_logits_have_their_shapes(self) -> None:
        """`forward` returns [T, hidden]. `logits` maps [S, hidden] to [S, V] in a floating-point dtype."""
        paged = PagedModel(self.model())
        (hidden,) = paged.step([Tokens(0, _PROMPT)])
        logits = paged.model.logits(hidden[-2:])
        assert hidden.shape[0] == len(_PROMPT), (
            f"hidden states of {len(_PROMPT)} tokens have shape {list(hidden.shape)}"
        )
        vocab_size = load_model_config(self.checkpoint()).vocab_size
        assert logits.shape == (2, vocab_size), f"expected logits of shape [2, {vocab_size}], got {list(logits.shape)}"
        assert logits.is_floating_point(), f"logits are {logits.dtype}"

    def test_of_wanted_tokens_hidden_states_are_those_of_all(self, page_size: int) -> None:
        """If `selects_tokens` is true, `forward` returns only the hidden states of `wanted_idx`, [W, hidden]."""
        requests = [Tokens(0, _PROMPT[:1]), Tokens(1, _PROMPT[:5])]
        every = torch.cat(PagedModel(self.model(), page_size=page_size).step(requests))
        for wanted in ([0], [4], [0, 2, 4], [0, 1, 2, 3, 4, 5]):
            paged = PagedModel(self.model(), page_size=page_size)
            if paged.model.selects_tokens:
                self._assert_close(paged.step_wanted(requests, wanted), every[wanted])

    def test_captured_inputs_are_the_residual_stream(self, page_size: int) -> None:
        """If `captures_inputs` is true, `forward_with_inputs` returns `forward`'s result, and inputs of layers.

        The input of layer 0 is `embed_tokens`, and that of layer 1 depends on the tokens before.
        """
        paged = PagedModel(self.model(), page_size=page_size)
        if not paged.model.captures_inputs:
            return
        (expected,) = PagedModel(self.model(), page_size=page_size).step([Tokens(0, _PROMPT)])
        hidden, (first, second, again) = paged.step_with_inputs(Tokens(0, _PROMPT), (0, 1, 0))
        self._assert_close(hidden, expected)
        self._assert_close(first, paged.model.embed_tokens(torch.tensor(_PROMPT)))
        self._assert_close(again, first)
        assert second.shape == first.shape, f"inputs have shapes {list(first.shape)} and {list(second.shape)}"
        assert not torch.equal(second, first), "the inputs of layers 0 and 1 are equal"

    def test_a_head_gives_as_many_numbers_as_it_has_labels(self) -> None:
        """If a model has a classification head, `score` returns `num_labels` numbers for each text, [texts, labels]."""
        model = self.model()
        if model.num_labels is None:
            return  # the model has no classification head
        (hidden,) = PagedModel(model).step([Tokens(0, _PROMPT)])
        scores = model.score(hidden[-2:])
        assert scores.shape == (2, model.num_labels), f"2 texts have scores of shape {list(scores.shape)}"
        assert scores.is_floating_point(), f"scores are {scores.dtype}"

    def test_a_twin_without_memory_checks_what_the_model_checks(self) -> None:
        """A model can be created on the meta device, where `load_weights` makes the same checks as elsewhere."""
        context = ModelContext(load_model_config(self.checkpoint()), torch.device("meta"), torch.float32)
        self.create(context).load_weights(self.weights().items())
        name = next(iter(self.weights()))
        missing = {other: tensor for other, tensor in self.weights().items() if other != name}
        try:
            self.create(context).load_weights(missing.items())
        except WeightError:
            return
        raise AssertionError(f"on the meta device, load_weights raised no WeightError about the missing {name}")

    def test_attention_layers_are_listed_once(self) -> None:
        """`attention_layers` lists every layer once, in order of `layer_id`, which counts from 0."""
        paged = PagedModel(self.model())
        layers = list(paged.model.attention_layers)
        assert [layer.layer_id for layer in layers] == list(range(len(layers)))
        assert all(layer.num_heads % layer.num_kv_heads == 0 for layer in layers), "H must be a multiple of H_kv"
        paged.step([Tokens(0, _PROMPT)])
        called = sorted(paged.backend.calls, key=lambda layer: layer.layer_id)
        assert called == layers, f"forward() used the layers {called}, but attention_layers lists {layers}"

    def test_state_layers_are_listed_once(self) -> None:
        """`state_layers` lists every layer once, in order of `layer_id`, which counts from 0."""
        layers = list(self.model().state_layers)
        assert [layer.layer_id for layer in layers] == list(range(len(layers)))
        assert all(layer.num_bytes > 0 for layer in layers), "a state layer has no state"

    def test_a_stored_state_continues_like_the_original(self, page_size: int, chunk_len: int) -> None:
        """A request continues from a stored state as from its own state, also if the state was stored within a step."""
        whole = PagedModel(self.model(), page_size=page_size).run_in_chunks(_PROMPT, len(_PROMPT))
        paged = PagedModel(self.model(), page_size=page_size)
        if not paged.model.state_layers:
            return  # the model has no state
        for store_at in range(1, len(_PROMPT)):
            (stored,) = paged.step([Tokens(0, _PROMPT[: store_at + 1], store_at=store_at)])
            self._assert_close(stored, whole[: store_at + 1])
            first = Tokens(0, _PROMPT[store_at:][:chunk_len], store_at, from_stored=True)
            (continued,) = paged.step([first])
            self._assert_close(continued, whole[store_at:][:chunk_len])
            end = store_at + len(first.token_ids)
            if end < len(_PROMPT):
                self._assert_close(paged.step([Tokens(0, _PROMPT[end:], end)])[0], whole[end:])

    def test_loading_sets_every_parameter(self) -> None:
        """`load_weights` sets every parameter: no value of earlier weights remains."""
        model = self.model((name, tensor * 1.5 + 0.25) for name, tensor in self.weights().items())
        model.load_weights(self.weights().items())
        assert torch.equal(_logits(model), _logits(self.model()))

    def test_every_tensor_reaches_the_model(self) -> None:
        """`load_weights` uses every tensor: a change of any tensor changes the logits."""
        expected, weights = _logits(self.model()), self.weights()
        for name, tensor in weights.items():
            changed = {**weights, name: tensor * 1.5 + 0.25}
            assert not torch.equal(_logits(self.model(changed.items())), expected), f"{name} has no effect"

    def test_tensors_of_another_dtype_are_converted(self) -> None:
        """`load_weights` converts tensors of another dtype to the model's dtype."""
        narrow = {name: tensor.to(torch.bfloat16) for name, tensor in self.weights().items()}
        wide = {name: tensor.float() for name, tensor in narrow.items()}
        assert torch.equal(_logits(self.model(narrow.items())), _logits(self.model(wide.items())))

    def test_a_missing_tensor_is_named(self) -> None:
        """If a tensor is missing, `load_weights` raises a WeightError that contains its name."""
        weights = self.weights()
        for name in weights:
            self._assert_refused({other: tensor for other, tensor in weights.items() if other != name}, name)

    def test_a_surplus_tensor_is_named(self) -> None:
        """If there is an unknown tensor, `load_weights` raises a WeightError that contains its name."""
        name = "model.layers.0.self_attn.surplus_proj.weight"
        self._assert_refused({**self.weights(), name: torch.zeros(2, 2)}, name)

    def test_a_tensor_of_the_wrong_shape_is_named(self) -> None:
        """If a tensor has a wrong shape, `load_weights` raises a WeightError that contains its name."""
        weights = self.weights()
        for name, tensor in weights.items():
            self._assert_refused({**weights, name: torch.cat([tensor, tensor[:1]])}, name)

    def _assert_refused(self, weights: Mapping[str, Tensor], name: str) -> None:
        message = self._error_of(weights)
        assert message is not None, f"load_weights raised no WeightError about {name}"
        assert name in message, f"the error message does not contain {name}: {message}"

    def _error_of(self, weights: Mapping[str, Tensor]) -> str | None:
        """Return the message of the WeightError that loading raises; None if loading raises no error."""
        try:
            self.model(weights.items())
        except WeightError as error:
            return str(error)
        return None

    def _assert_close(self, got: Tensor, expected: Tensor) -> None:
        worst = float((got - expected).abs().max() / expected.abs().max())
        # A difference of NaN also fails this check.
        assert worst <= self.tolerance, f"hidden states differ by {worst:.1e} of the largest absolute value"


def _logits(model: Model) -> Tensor:
    """Return the logits of a prompt, or the scores if the model has a classification head."""
    (hidden,) = PagedModel(model).step([Tokens(0, _PROMPT)])
    return model.logits(hidden) if model.num_labels is None else model.score(hidden)
