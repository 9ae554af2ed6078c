"""The conformance kit of attention backends."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionCapabilities, AttentionContext, AttentionLayer
from graftlm.layers.kv_codes import KV_DTYPES
from graftlm.testing.attention_scene import AttentionScene, Outcome, random_requests
from graftlm.testing.conformance import Conformance
from graftlm.testing.reference_attention import ReferenceAttention

__all__ = ["AttentionBackendConformance"]

#: dtype -> maximum absolute and relative difference from the oracle's output that rounding may cause.
_TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}

_DEFAULT_LAYER = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)


class AttentionBackendConformance(Conformance, ABC):
    """The kit for the contract `AttentionBackend`, which compares a backend with a float32 oracle.

    In all tests, cache slots that the batch must not read contain NaN.

        class TestMyBackend(AttentionBackendConformance):
            def create(self, context):
                return MyBackend(context)

    Attributes:
        capabilities: capabilities of the backend's provider; tests of other features are skipped.
        device: device of all tensors.
        parameters: sizes and seeds; `window` is tested with contexts of 1 to 40 tokens.
    """

    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities()
    device: ClassVar[str] = "cpu"
    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {
        "page_size": (1, 4, 16),
        "dtype": ("float32", "bfloat16"),
        "head_dim": (16, 64, 80, 128),
        "group": (1, 2, 3, 4, 8),
        "window": (1, 7, 16, 39, 40, 100),
        "seed": (0, 1, 2),
    }

    @abstractmethod
    def create(self, context: AttentionContext) -> AttentionBackend:
        """Return a new backend."""

    def test_random_batches_match_the_oracle(self, page_size: int, dtype: str, seed: int) -> None:
        """The output is correct for any mix of one-token and longer requests, with any pages."""
        self.check(self.scene(random_requests(seed), page_size=page_size, dtype=dtype, seed=seed))

    def test_every_shape_matches_the_oracle(self, head_dim: int, group: int, dtype: str) -> None:
        """Groups of any size of query heads share a key/value head, for any head size."""
        layer = AttentionLayer(0, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5)
        self.check(self.scene([(20, 1), (0, 1), (3, 9), (0, 18)], layer, page_size=4, dtype=dtype))

    def test_a_query_sees_exactly_its_window(self, window: int, page_size: int) -> None:
        """A query at position p attends to positions max(0, p - window + 1) .. p."""
        self.require(self.capabilities.sliding_window, "sliding windows")
        layer = replace(_DEFAULT_LAYER, sliding_window=window)
        requests = [(39, 1), (0, 1), (6, 1), (15, 25), (0, 40), (37, 3)]
        self.check(self.scene(requests, layer, page_size=page_size))

    def test_tokens_before_the_window_may_be_gone(self, page_size: int) -> None:
        """Tokens before every query's window do not affect the output: their pages may have other content by then."""
        self.require(self.capabilities.sliding_window, "sliding windows")
        layer = replace(_DEFAULT_LAYER, sliding_window=8)
        self.check(self.scene([(39, 1), (70, 1), (50, 12)], layer, page_size=page_size, forget_before_window=True))

    def test_scores_are_capped(self, dtype: str, page_size: int) -> None:
        """A soft cap c replaces scores s by c * tanh(s / c)."""
        self.require(self.capabilities.soft_cap, "soft caps")
        layer = replace(_DEFAULT_LAYER, scale=1.0, soft_cap=3.0)
        self.check(self.scene([(20, 1), (0, 1), (11, 7), (0, 30)], layer, page_size=page_size, dtype=dtype))

    def test_values_may_be_a_prefix_of_the_keys(self, page_size: int, dtype: str) -> None:
        """With `value_prefix_dim`, values are the first numbers of the keys; only keys are written."""
        self.require(self.capabilities.value_prefix, "values that are a prefix of the keys")
        latent = AttentionLayer(0, num_heads=6, num_kv_heads=1, head_dim=80, scale=0.1, value_prefix_dim=48)
        several = replace(latent, layer_id=1, num_kv_heads=2, soft_cap=2.0)
        requests = [(40, 1), (0, 1), (300, 1), (11, 7), (0, 33)]
        scene = self.scene(requests, latent, several, page_size=page_size, dtype=dtype)
        outcome = self.check(scene)
        assert [out.shape for out in outcome.outputs] == [(43, 6 * 48)] * 2
        self._check_written(scene, outcome)

    def test_sinks_take_their_part_of_the_softmax(self, page_size: int, dtype: str) -> None:
        """A sink is an additional score of its head with a value of zero, also in layers with a window."""
        self.require(self.capabilities.sinks, "attention sinks")
        sinks = torch.tensor([-30.0, 0.0, 1.5, 30.0]).to(device=self.device, dtype=getattr(torch, dtype))
        layer = replace(_DEFAULT_LAYER, sinks=sinks)
        layers = [layer]
        if self.capabilities.sliding_window:
            layers.append(replace(layer, layer_id=1, sliding_window=7))
        self.check(self.scene([(90, 1), (0, 1), (20, 1), (11, 7), (0, 30)], *layers, page_size=page_size, dtype=dtype))

    def test_long_contexts_match_the_oracle(self, dtype: str, page_size: int) -> None:
        """The output is also correct if a context is so long that it is split into pieces."""
        self.check(self.scene([(2500, 1), (3, 1), (1029, 5)], page_size=page_size, dtype=dtype))

    def test_a_request_sees_what_another_writes(self, page_size: int) -> None:
        """A request attends to tokens that another request of the same batch writes."""
        # Requests 1 and 2 write the first 32 tokens of pages that request 0 continues from.
        tables = [[*range(32 // page_size), 40], list(range(32 // page_size)), list(range(32 // page_size))]
        requests = [(32, 1), (0, 16), (16, 16)]
        self.check(self.scene(requests, page_size=page_size, page_tables=tables))

    def test_requests_share_pages(self, page_size: int, dtype: str) -> None:
        """Requests whose page tables start with the same pages read the same tokens."""
        shared = list(range(48 // page_size))
        requests = [(48, 1), (50, 1), (63, 1), (48, 16)]
        tables = [[*shared, *range(50 + 16 * b, 50 + 16 * (b + 1))] for b in range(len(requests))]
        self.check(self.scene(requests, page_size=page_size, page_tables=tables, dtype=dtype))

    def test_a_batch_gives_each_request_what_it_gets_alone(self, page_size: int, seed: int) -> None:
        """In any batch, the output of each request is the same as in a batch of its own."""
        scene = self.scene(random_requests(seed), page_size=page_size, seed=seed)
        together = scene.run(self.create).outputs[0]
        for b in range(scene.batch.num_requests):
            first, end = scene.batch.cu_seqlens_q[b : b + 2].tolist()
            self.compare(scene.alone(b).run(self.create).outputs[0], together[first:end], scene)

    def test_other_slots_never_matter(self, page_size: int) -> None:
        """The content of unused slots, also in partly used pages, does not affect the output."""
        scene = self.scene(random_requests(3), page_size=page_size)
        expected = scene.run(self.create).outputs[0]
        for garbage in (0.0, 1e4, float("inf")):
            self.compare(scene.with_garbage(garbage).run(self.create).outputs[0], expected, scene)

    def test_a_request_of_nan_fails_alone(self, page_size: int) -> None:
        """A request with NaN in its own tensors does not affect other requests."""
        requests = [(9, 1), (21, 1), (5, 1), (0, 12), (8, 20)]
        scene = self.scene(requests, page_size=page_size)
        expected = scene.run(self.create).outputs[0]
        for b in (1, 3):
            first, end = scene.batch.cu_seqlens_q[b : b + 2].tolist()
            others = [t for t in range(scene.batch.num_tokens) if not first <= t < end]
            for name in ("q", "k", "v"):
                broken = scene.with_input(name, slice(first, end), float("nan"))
                self.compare(broken.run(self.create).outputs[0][others], expected[others], scene)

    def test_only_the_slots_of_the_batch_change(self, page_size: int, dtype: str) -> None:
        """After `forward`, keys and values are at `out_slots`; inputs and other slots are unchanged."""
        scene = self.scene(random_requests(4), page_size=page_size, dtype=dtype)
        before = [tensor.clone() for inputs in scene.inputs for tensor in inputs]
        outcome = scene.run(self.create)
        for was, now in zip(before, (tensor for inputs in scene.inputs for tensor in inputs), strict=True):
            assert torch.equal(was, now), "forward() changed its input"
        self._check_written(scene, outcome)

    def test_a_cache_in_8_bits_matches_what_it_holds(self, dtype: str, page_size: int) -> None:
        """A cache of each of `kv_dtypes` is written as `KVCache` specifies, and read as the numbers in it."""
        self.require(bool(self.capabilities.kv_dtypes), "caches in 8 bits")
        layers = [AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=80, scale=0.1)]
        if self.capabilities.sliding_window:
            layers.append(replace(_DEFAULT_LAYER, layer_id=len(layers), sliding_window=19))
        if self.capabilities.soft_cap:
            layers.append(replace(_DEFAULT_LAYER, layer_id=len(layers), soft_cap=3.0))
        if self.capabilities.sinks:
            sinks = torch.tensor([-3.0, 0.0, 1.5, 3.0]).to(device=self.device, dtype=getattr(torch, dtype))
            layers.append(replace(_DEFAULT_LAYER, layer_id=len(layers), sinks=sinks))
        if self.capabilities.value_prefix:
            layers.append(AttentionLayer(len(layers), 6, 1, head_dim=80, scale=0.1, value_prefix_dim=48))
        requests = [(90, 1), (0, 1), (130, 1), (11, 7), (0, 30)]
        for kv_dtype in self.capabilities.kv_dtypes:
            scene = self.scene(requests, *layers, page_size=page_size, dtype=dtype, kv_dtype=kv_dtype)
            self._check_written(scene, self.check(scene))

    def test_a_request_of_nan_fails_alone_in_8_bits(self, page_size: int) -> None:
        """A request that writes NaN to an 8-bit cache does not affect other requests."""
        self.require(bool(self.capabilities.kv_dtypes), "caches in 8 bits")
        for kv_dtype in self.capabilities.kv_dtypes:
            scene = self.scene([(9, 1), (21, 1), (0, 12)], page_size=page_size, kv_dtype=kv_dtype)
            expected = scene.run(self.create).outputs[0]
            broken = scene.with_input("k", slice(1, 2), float("nan")).run(self.create).outputs[0]
            assert broken[1].isnan().all()
            others = [0, *range(2, 14)]
            self.compare(broken[others], expected[others], scene)

    def test_inputs_may_be_views(self, dtype: str) -> None:
        """Queries, keys and values may be views of one tensor, in which only the last dimension is contiguous."""
        scene = self.scene(random_requests(5), page_size=4, dtype=dtype)
        expected = scene.run(self.create).outputs[0]
        self.compare(scene.packed().run(self.create).outputs[0], expected, scene)

    def test_the_output_is_contiguous(self, dtype: str) -> None:
        """`forward` returns a contiguous tensor [T, H * D] of q's dtype."""
        scene = self.scene([(5, 1), (0, 6)], page_size=4, dtype=dtype)
        out = scene.run(self.create).outputs[0]
        assert out.shape == (7, _DEFAULT_LAYER.num_heads * _DEFAULT_LAYER.head_dim)
        assert out.dtype == getattr(torch, dtype)
        assert out.is_contiguous()

    def test_layers_may_differ(self, page_size: int) -> None:
        """One call of `prepare` serves layers with different windows, head counts and head sizes."""
        self.require(self.capabilities.sliding_window, "sliding windows")
        layers = (
            AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125),
            AttentionLayer(1, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, sliding_window=5),
            AttentionLayer(2, num_heads=8, num_kv_heads=1, head_dim=16, scale=0.5, sliding_window=11),
            AttentionLayer(3, num_heads=3, num_kv_heads=3, head_dim=16, scale=0.25),
        )
        self.check(self.scene([(20, 1), (3, 1), (8, 9), (0, 14)], *layers, page_size=page_size))

    def test_steps_follow_each_other(self, page_size: int, dtype: str) -> None:
        """Chunked prefill followed by decode, with requests that join and leave, matches the oracle."""
        steps = ([(0, 13)], [(13, 1), (0, 6)], [(14, 1), (6, 1), (0, 30)], [(7, 1), (30, 1)], [(31, 5)], [(36, 1)])
        owners = ([0], [0, 1], [0, 1, 2], [1, 2], [2], [2])
        tables = [list(range(40 * b, 40 * (b + 1))) for b in range(3)]
        scenes = [
            self.scene(requests, page_size=page_size, page_tables=[tables[b] for b in who], dtype=dtype, seed=i)
            for i, (requests, who) in enumerate(zip(steps, owners, strict=True))
        ]
        actual = scenes[0].run_all(self.create, scenes)
        expected = scenes[0].run_all(ReferenceAttention, scenes)
        for scene, ours, theirs in zip(scenes, actual, expected, strict=True):
            self.compare(ours, theirs, scene)

    # Helpers of the tests.

    def scene(
        self,
        requests: Sequence[tuple[int, int]],
        *layers: AttentionLayer,
        page_size: int = 1,
        dtype: str = "float32",
        seed: int = 0,
        page_tables: Sequence[Sequence[int]] | None = None,
        forget_before_window: bool = False,
        kv_dtype: str | None = None,
    ) -> AttentionScene:
        """Create requests with a cache. Skip the test if the backend does not claim to support the layers or dtypes.

        Args:
            requests: (tokens in the cache, new tokens) of each request; one-token requests first.
            layers: the attention layers; empty: one default layer.
            page_size: number of tokens in a page.
            dtype: dtype of queries, keys and values.
            seed: seed of the random numbers.
            page_tables: page ids of each request; None: random pages.
            forget_before_window: whether cached tokens before every query's window are NaN.
            kv_dtype: name of the cache's dtype; None: `dtype`.
        """
        layers = layers or (_DEFAULT_LAYER,)
        claims = self.capabilities
        self.require(claims.dtypes is None or dtype in claims.dtypes, dtype)
        self.require(claims.page_sizes is None or page_size in claims.page_sizes, f"pages of {page_size}")
        for layer in layers:
            self.require(claims.head_dims is None or layer.head_dim in claims.head_dims, f"head_dim {layer.head_dim}")
        return AttentionScene.draw(
            requests,
            layers,
            page_size=page_size,
            dtype=getattr(torch, dtype),
            device=torch.device(self.device),
            seed=seed,
            page_tables=page_tables,
            forget_before_window=forget_before_window,
            kv_dtype=None if kv_dtype is None else KV_DTYPES[kv_dtype],
        )

    @staticmethod
    def require(claimed: bool, what: str) -> None:
        """Skip the test if the backend does not claim a feature.

        Args:
            claimed: whether the backend claims the feature.
            what: name of the feature.
        """
        if not claimed:
            raise SkipTest(f"the backend does not claim to support {what}")

    def check(self, scene: AttentionScene) -> Outcome:
        """Compare every layer's output with the oracle's output; return the backend's outcome."""
        actual, expected = scene.run(self.create), scene.run(ReferenceAttention)
        self._compare_outcomes(actual, expected, scene)
        return actual

    @staticmethod
    def _check_written(scene: AttentionScene, outcome: Outcome) -> None:
        """Check that the batch's slots contain the expected bits, and that all other slots are unchanged."""
        for cache, past, ideal in scene.written(outcome.store):
            expected = past.clone()
            expected[scene.batch.out_slots] = ideal[scene.batch.out_slots]
            torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)

    def _compare_outcomes(self, actual: Outcome, expected: Outcome, scene: AttentionScene) -> None:
        for ours, theirs in zip(actual.outputs, expected.outputs, strict=True):
            self.compare(ours, theirs, scene)

    @staticmethod
    def compare(actual: Tensor, expected: Tensor, scene: AttentionScene) -> None:
        """Compare two outputs with the tolerance of the scene's dtype."""
        tolerance = _TOLERANCES[str(scene.context.dtype).removeprefix("torch.")]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
