"""A draft model's batches give the tokens that the model generates from all tokens at once."""

import random

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from graftlm.contracts import AttentionContext, DraftModelBatch
from graftlm.execution.greedy_model import GreedyModel
from graftlm.execution.kv_store import KVStore
from graftlm.testing.paged_model import PagedModel, Tokens
from graftlm.testing.reference_attention import ReferenceAttention

CONTEXT, ROWS = 48, 4
CPU = torch.device("cpu")


class Bench:
    """A greedy model with pages in random order, and a second copy of the model that computes what is expected."""

    def __init__(self, load, name, page_size):
        self.page_size = page_size
        self.pages_per_row = -(-CONTEXT // page_size)
        num_pages = ROWS * self.pages_per_row
        self.tables = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(ROWS, -1)
        model = load(name)
        kv = KVStore(model.attention_layers, num_pages, page_size, torch.float32, CPU)
        for i in range(kv.num_layers):
            kv.keys(i).fill_(torch.nan)
            kv.values(i).fill_(torch.nan)
        attention = ReferenceAttention(
            AttentionContext(model.attention_layers, kv, page_size, CPU, torch.float32, ROWS, CONTEXT)
        )
        model.bind_attention(attention)
        self.model = GreedyModel(
            model,
            attention,
            CPU,
            vocab_size=320,
            num_tokens=300,
            context_len=CONTEXT,
            max_rows=ROWS,
            num_pages=num_pages,
            page_size=page_size,
        )
        self.reference = PagedModel(load(name), max_context_len=CONTEXT)

    def run(self, rows):
        """Run a batch of (row, text, number of computed tokens, limit); check and return its tokens."""
        batch = DraftModelBatch(
            token_ids=np.array([token for _, text, done, _ in rows for token in text[done:]], dtype=np.int32),
            query_lens=np.array([len(text) - done for _, text, done, _ in rows], dtype=np.int32),
            starts=np.array([done for _, _, done, _ in rows], dtype=np.int32),
            limits=np.array([limit for *_, limit in rows], dtype=np.int32),
            page_table=self.tables[[row for row, *_ in rows]],
        )
        found = self.model.run(batch)
        assert found.token_ids.shape == found.probabilities.shape == (len(rows), int(batch.limits.max()))
        for b, (_, text, _, limit) in enumerate(rows):
            token_ids, probabilities = self.expected(text, limit)
            assert found.token_ids[b, :limit].tolist() == token_ids
            np.testing.assert_allclose(found.probabilities[b, :limit], probabilities, rtol=1e-4)
            assert not found.token_ids[b, limit:].any()
        return found.token_ids

    def expected(self, text, limit):
        token_ids, probabilities = list(text), []
        with torch.inference_mode():
            for _ in range(limit):
                (hidden,) = self.reference.step([Tokens(0, token_ids)])
                probs = torch.softmax(self.reference.model.logits(hidden[-1:])[0, :300].float(), dim=0)
                token_ids.append(int(probs.argmax()))
                probabilities.append(float(probs.max()))
        return token_ids[len(text) :], probabilities


@pytest.fixture
def load(checkpoint):
    from graftlm.checkpoint import iter_weights, load_model_config
    from graftlm.contracts import ModelContext
    from graftlm.registry import Registry

    def load(name):
        path = checkpoint(name)
        config = load_model_config(path)
        registry = Registry.load()
        context = ModelContext(config, CPU, torch.float32)
        model = registry.create("model", registry.model_for(config.architectures), {}, context)
        model.load_weights(iter_weights(path, torch.float32))
        return model

    return load


@pytest.mark.parametrize(("name", "page_size"), [("llama", 1), ("llama", 4), ("mistral", 16), ("gemma2", 4)])
def test_a_batch_continues_each_sequence(load, name, page_size):
    bench = Bench(load, name, page_size)
    draw = random.Random(1)
    texts = [[draw.randrange(300) for _ in range(length)] for length in (9, 1, 4, 20)]
    found = bench.run([(row, text, 0, limit) for row, text, limit in zip(range(4), texts, (3, 5, 0, 1), strict=True)])
    longer = [[*texts[0], *found[0, :2], 7], [*texts[1], *found[1, :5], 8, 9], [*texts[2], 3], texts[3]]
    computed = (len(texts[0]) + 2, len(texts[1]) + 4, len(texts[2]), len(texts[3]) - 1)
    bench.run([(row, longer[row], computed[row], limit) for row, limit in ((3, 2), (1, 4), (0, 1), (2, 3))])


def test_a_batch_without_limits_only_computes(load):
    bench = Bench(load, "llama", 4)
    text = list(range(12))
    assert bench.run([(2, text[:8], 0, 0)]).shape == (1, 0)
    bench.run([(2, text, 8, 3)])


class CopiesToHost(TorchFunctionMode):
    """Counts the calls that wait for a device."""

    def __init__(self):
        super().__init__()
        self.num_copies = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.num_copies += func in (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.tolist)
        return func(*args, **(kwargs or {}))


def test_a_batch_waits_for_the_device_once(load):
    bench = Bench(load, "llama", 4)
    batch = DraftModelBatch(
        token_ids=np.arange(6, dtype=np.int32),
        query_lens=np.array([4, 2], dtype=np.int32),
        starts=np.zeros(2, dtype=np.int32),
        limits=np.array([5, 2], dtype=np.int32),
        page_table=bench.tables[:2],
    )
    with CopiesToHost() as counter:
        bench.model.run(batch)
    assert counter.num_copies == 1
