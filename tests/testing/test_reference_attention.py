import pytest
import torch

from graftlm.contracts import AttentionContext, AttentionLayer
from graftlm.errors import InvariantError
from graftlm.execution.kv_store import KVStore
from graftlm.testing.batches import make_batch
from graftlm.testing.reference_attention import ReferenceAttention

CPU = torch.device("cpu")
PAGES = [6, 2, 5, 0]


def build(layer: AttentionLayer) -> tuple[ReferenceAttention, KVStore]:
    kv = KVStore([layer], num_pages=8, page_size=3, dtype=torch.float32, device=CPU)
    kv.keys(0).fill_(torch.nan)
    kv.values(0).fill_(torch.nan)
    return ReferenceAttention(AttentionContext([layer], kv, 3, CPU, torch.float32, 4, 12)), kv


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """Attend over the whole sequence at once, with a mask, in float64."""
    groups = layer.num_heads // layer.num_kv_heads
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (layer.sliding_window or len(k)))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1).float()


@pytest.mark.parametrize("chunk_len", [1, 4, 11])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_chunks_over_scattered_pages_equal_dense_attention(
    chunk_len: int, window: int | None, soft_cap: float | None, num_kv_heads: int
) -> None:
    layer = AttentionLayer(0, 4, num_kv_heads, 8, 0.4, sliding_window=window, soft_cap=soft_cap)
    backend, kv = build(layer)
    q, k, v = torch.randn(11, 4, 8), torch.randn(11, num_kv_heads, 8), torch.randn(11, num_kv_heads, 8)
    pieces = []
    for start in range(0, 11, chunk_len):
        rows = slice(start, min(start + chunk_len, 11))
        backend.prepare(make_batch([(range(11)[rows], start)], [PAGES], page_size=3))
        pieces.append(backend.forward(q[rows], k[rows], v[rows], layer))
    torch.testing.assert_close(torch.cat(pieces), dense(q, k, v, layer))
    assert torch.equal(kv.keys(0)[PAGES].flatten(0, 1)[:11], k)
    assert torch.equal(kv.values(0)[PAGES].flatten(0, 1)[:11], v)
    assert int(kv.keys(0).isnan().all(dim=-1).all(dim=-1).sum()) == 8 * 3 - 11


def test_forward_before_prepare_is_refused() -> None:
    layer = AttentionLayer(0, 1, 1, 2, 1.0)
    with pytest.raises(InvariantError, match="prepare"):
        build(layer)[0].forward(*torch.zeros(3, 1, 1, 2), layer)
