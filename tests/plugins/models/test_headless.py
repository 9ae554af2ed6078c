"""Models without an output projection, with and without a score head."""

from pathlib import Path

import pytest
import torch

from graftlm.checkpoint import iter_weights
from graftlm.contracts import Model, ModelContext, NoOptions
from graftlm.errors import InvariantError, UnsupportedArchitectureError, WeightError
from graftlm.testing.model import ModelConformance
from graftlm.testing.tiny_models import write_tiny_checkpoint
from graftlm_models import provide_models
from graftlm_models.headless import HeadlessModel


def create(name: str, context: ModelContext) -> Model:
    (provider,) = (provider for provider in provide_models() if provider.name == name)
    return provider.create(NoOptions(), context)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("classifier"), "gemma3_text", num_labels=3, vocab_size=128)


class TestHeadlessConformance(ModelConformance):
    """A classifier passes the kit of models."""

    @pytest.fixture(autouse=True)
    def _folder(self, classifier: Path) -> None:
        self._path = classifier

    def create(self, context: ModelContext) -> Model:
        return create("sequence_classification", context)

    def checkpoint(self) -> Path:
        return self._path


def test_some_tensors_can_be_replaced_and_all_can_be_read(classifier: Path, new_context) -> None:
    model = create("sequence_classification", new_context(classifier))
    weights = dict(iter_weights(classifier))
    model.load_weights(weights.items())
    changed = {"score.weight": torch.ones(3, 64), "model.norm.weight": torch.ones(64)}
    model.update_weights(changed.items())
    for name, tensor in (weights | changed).items():
        torch.testing.assert_close(model.read_weight(name), tensor, rtol=0, atol=1e-6)
    with pytest.raises(WeightError, match=r"score\.bias"):
        model.update_weights([("score.bias", torch.ones(3))])


def test_without_a_score_head_there_are_no_scores(classifier: Path, new_context) -> None:
    context = new_context(classifier)
    with pytest.raises(UnsupportedArchitectureError, match=r"Available: LlamaModel, .*Gemma3TextModel"):
        create("text_embedding", context)
    model = create("sequence_classification", context)
    assert (model.num_labels, model.generates) == (3, False)
    embedder = HeadlessModel(model, None)
    assert (embedder.num_labels, embedder.generates) == (None, False)
    with pytest.raises(InvariantError, match="no score head"):
        embedder.score(torch.zeros(1, 64))
