"""The conformance kit of attention backends: the oracle passes, and each faulty backend fails."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from graftlm.testing import AttentionBackendConformance, run_conformance
from graftlm.testing.reference_attention import ReferenceAttention

FEW: dict = {
    "page_size": (4,),
    "dtype": ("float32",),
    "head_dim": (16,),
    "group": (2,),
    "window": (7,),
    "seed": (0,),
}


class ReadsBeforeOtherRequestsAreWritten(ReferenceAttention):
    """Attends request by request, from the last to the first. Before each request, only that request's own tokens
    are written.
    """

    def forward(self, q, k, v, layer):
        batch, outs = self._batch, []
        for b in reversed(range(batch.num_requests)):
            first, end = batch.cu_seqlens_q[b : b + 2].tolist()
            self._batch = replace(
                batch,
                positions=batch.positions[first:end],
                out_slots=batch.out_slots[first:end],
                cu_seqlens_q=batch.cu_seqlens_q[b : b + 2] - first,
                page_table=batch.page_table[b : b + 1],
                seq_lens=batch.seq_lens[b : b + 1],
                seq_lens_cpu=batch.seq_lens_cpu[b : b + 1],
            )
            outs.append(super().forward(q[first:end], k[first:end], v[first:end], layer))
        self._batch = batch
        return torch.cat(outs[::-1])


class IgnoresTheWindow(ReferenceAttention):
    def forward(self, q, k, v, layer):
        return super().forward(q, k, v, replace(layer, sliding_window=None))


class WindowOneTooLong(ReferenceAttention):
    def forward(self, q, k, v, layer):
        longer = None if layer.sliding_window is None else layer.sliding_window + 1
        return super().forward(q, k, v, replace(layer, sliding_window=longer))


class IgnoresTheSoftCap(ReferenceAttention):
    def forward(self, q, k, v, layer):
        return super().forward(q, k, v, replace(layer, soft_cap=None))


class ScalesItsInput(ReferenceAttention):
    def forward(self, q, k, v, layer):
        q.mul_(layer.scale)
        return super().forward(q, k, v, replace(layer, scale=1.0))


class WritesTheNextSlot(ReferenceAttention):
    def forward(self, q, k, v, layer):
        keys = self._kv.keys(layer.layer_id).view(-1, layer.num_kv_heads, layer.head_dim)
        keys[(self._batch.out_slots + 1) % len(keys)] = 0
        return super().forward(q, k, v, layer)


class ReturnsSeparateHeads(ReferenceAttention):
    def forward(self, q, k, v, layer):
        return super().forward(q, k, v, layer).view(q.shape)


class ReversesHeads(ReferenceAttention):
    def forward(self, q, k, v, layer):
        return super().forward(q.flip(1), k, v, layer)


UNCHANGED = "After `forward`, keys and values are at `out_slots`; inputs and other slots are unchanged."


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (None, None),
        (
            ReadsBeforeOtherRequestsAreWritten,
            "A request attends to tokens that another request of the same batch writes.",
        ),
        (IgnoresTheWindow, "A query at position p attends to positions max(0, p - window + 1) .. p."),
        (WindowOneTooLong, "A query at position p attends to positions max(0, p - window + 1) .. p."),
        (IgnoresTheSoftCap, "A soft cap c replaces scores s by c * tanh(s / c)."),
        (ScalesItsInput, UNCHANGED),
        (
            WritesTheNextSlot,
            "After `forward`, keys and values are at `out_slots`; inputs and other slots are unchanged.",
        ),
        (ReturnsSeparateHeads, "`forward` returns a contiguous tensor [T, H * D] of q's dtype."),
        (ReversesHeads, "Groups of any size of query heads share a key/value head, for any head size."),
    ],
)
def test_a_faulty_backend_fails_the_sentence_that_it_breaks(broken, sentence):
    class Kit(AttentionBackendConformance):
        parameters: ClassVar = FEW

        def create(self, context):
            return (broken or ReferenceAttention)(context)

        def test_long_contexts_match_the_oracle(self):
            """Skipped, because the oracle is slow."""

    broken_sentences = {result.sentence for result in run_conformance(Kit) if result.error}
    assert broken_sentences == set() if sentence is None else sentence in broken_sentences
