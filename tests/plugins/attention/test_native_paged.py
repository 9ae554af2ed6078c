from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from graftlm.contracts import AttentionCapabilities, AttentionLayer
from graftlm.errors import InvariantError
from graftlm.testing import run_conformance
from graftlm.testing.attention import AttentionBackendConformance
from graftlm.testing.attention_scene import AttentionScene
from graftlm.testing.reference_attention import ReferenceAttention
from graftlm_attention.native_paged import NativePagedAttention, native_obstacle


class TestNativePagedAttention(AttentionBackendConformance):
    capabilities = AttentionCapabilities(value_prefix=True, sinks=True, kv_dtypes=("int8",))
    parameters: ClassVar = {**AttentionBackendConformance.parameters, "head_dim": (16, 48, 64, 80, 128, 256)}

    @pytest.fixture(autouse=True)
    def _use_kernel(self, kernel):
        self.kernel = kernel

    def create(self, context):
        return NativePagedAttention(context, self.kernel)


def draw(requests, layer=None, dtype=torch.float32, page_size=4, kv_dtype=None):
    layer = layer or AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    return AttentionScene.draw(
        requests, [layer], page_size=page_size, dtype=dtype, device=torch.device("cpu"), kv_dtype=kv_dtype
    )


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    "special",
    [{}, {"soft_cap": 5.0}, {"sinks": torch.linspace(-3, 9, 6)}, {"value_prefix_dim": 16}],
    ids=["plain", "soft cap", "sinks", "value prefix"],
)
def test_the_number_of_threads_does_not_matter(kernel, num_threads, special, kv_dtype):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2, **special)
    scene = draw([(1999, 1), (700, 1), (3, 1), (400, 90)], layer, kv_dtype=kv_dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("soft_cap", [None, 50.0])
def test_scores_of_any_magnitude_are_weighted_exactly(kernel, magnitude, soft_cap):
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=16, scale=magnitude, soft_cap=soft_cap)
    scene = draw([(100, 1), (40, 20)], layer)
    out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    # A score's rounding error grows with its size, and with it the weights'.
    tolerance = 1e-5 * max(1.0, min(magnitude, 50.0 if soft_cap else magnitude))
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [16, 48, 576])
def test_products_of_int8_neither_overflow_nor_lose_what_is_small(kernel, head_dim):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=1, head_dim=head_dim, scale=1 / head_dim, value_prefix_dim=16)
    scene = draw([(700, 1), (0, 1), (60, 20)], layer, dtype=torch.bfloat16, kv_dtype=torch.int8)
    q, k, _ = scene.inputs[0]
    q[0], k[0] = 3.0, -5.0  # all products as large as can be, of one sign
    q[1, :, 1:] *= 1e-2  # most numbers far below the largest
    out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scale", [1e10, 1e25])
def test_of_scores_without_bounds_the_largest_has_all_the_weight(kernel, scale):
    """Their rounding errors are far greater than what an exponential of a difference can hold."""
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=16, scale=scale)
    scene = draw([(100, 1), (40, 20)], layer)
    out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("scale", [0.25, 0.0, -0.25])
def test_what_nobody_sees_has_no_weight_whatever_scores_are_multiplied_by(kernel, scale, kv_dtype):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=16, scale=scale)
    scene = draw([(20, 1), (3, 1), (5, 30)], layer, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    scene = scene.with_input("q", slice(0, 1), 0.0)  # relative to its largest number, which is 0
    out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=2e-2, atol=2e-2)


def test_many_threads_share_a_long_context_without_a_piece_past_its_end(kernel):
    """509 pieces of 256 tokens and one token more: rounded up, 508 are enough."""
    layer = AttentionLayer(0, num_heads=8, num_kv_heads=1, head_dim=16, scale=0.25)
    scene = draw([(509 * 256, 1)], layer, page_size=64).with_input("q", slice(0, 1), 8.0)
    scene.store.keys(0).fill_(-8.0)  # scores of -256: below whatever an empty piece may take for its largest
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(128)
        out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=1e-5, atol=1e-5)


def test_nan_of_a_request_reaches_its_own_output(kernel):
    scene = draw([(20, 1), (0, 10)])
    for tokens in (slice(0, 1), slice(1, 11)):
        out = scene.with_input("q", tokens, float("nan")).run(lambda c: NativePagedAttention(c, kernel)).outputs[0]
        assert out[tokens].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "device", "reason"),
    [
        (torch.float32, 64, "cpu", None),
        (torch.bfloat16, 80, "cpu", None),
        (torch.float16, 64, "cpu", "float16"),
        (torch.float32, 24, "cpu", "multiple of 16"),
        (torch.float32, 64, "cuda", "cuda"),
    ],
)
def test_an_obstacle_is_named(dtype, head_dim, device, reason):
    layer = AttentionLayer(0, num_heads=2, num_kv_heads=1, head_dim=head_dim, scale=1.0)
    context = replace(draw([(0, 1)], dtype=dtype).context, layers=[layer], dtype=dtype, device=torch.device(device))
    obstacle = native_obstacle(context)
    assert obstacle is None if reason is None else reason in obstacle


def test_tensors_that_do_not_fit_are_refused(kernel):
    scene = draw([(3, 1), (0, 5)])
    layer = scene.context.layers[0]
    q, k, v = scene.inputs[0]
    backend = NativePagedAttention(scene.context, kernel)
    with pytest.raises(InvariantError, match="before prepare"):
        backend.forward(q, k, v, layer)
    backend.prepare(scene.batch)
    with pytest.raises(InvariantError, match=r"expects q \(6, 4, 16\)"):
        backend.forward(q[:5], k, v, layer)
    with pytest.raises(InvariantError, match="float64"):
        backend.forward(q, k.double(), v, layer)


def test_one_openmp_runtime_serves_torch_and_the_kernel(kernel):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) == 1


def test_the_kit_notices_a_backend_that_ignores_the_window(kernel):
    class Forgetful(AttentionBackendConformance):
        parameters: ClassVar = {name: values[:2] for name, values in AttentionBackendConformance.parameters.items()}

        def create(self, context):
            layers = [replace(layer, sliding_window=None) for layer in context.layers]
            return NativePagedAttention(replace(context, layers=layers), kernel)

    failed = {result.name.split("[")[0] for result in run_conformance(Forgetful) if result.error is not None}
    assert "test_a_query_sees_exactly_its_window" in failed
    assert "test_random_batches_match_the_oracle" not in failed
