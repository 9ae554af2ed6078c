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


@pytest.mark.covering
class TestNativePagedAttention(AttentionBackendConformance):
    capabilities = AttentionCapabilities(value_prefix=True, sinks=True, kv_dtypes=("int8",))
    parameters: ClassVar = {**AttentionBackendConformance.parameters, "head_dim": (16, 48, 64, 80, 128, 256)}

    @pytest.fixture(autouse=True)
    def _use_kernel(self, kernel):
        self.kernel = kernel

    def create(self, context):
        return NativePagedAttention(context, self.kernel)


class TestNativePagedAttentionWithoutMatrixUnits(TestNativePagedAttention):
    """The path of machines without AMX; on such a machine, the same as above."""

    parameters: ClassVar = {**TestNativePagedAttention.parameters, "dtype": ("bfloat16",)}

    def create(self, context):
        return NativePagedAttention(context, self.kernel, matrix_units=False)


def draw(requests, layer=None, dtype=torch.float32, page_size=4, kv_dtype=None):
    layer = layer or AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    return AttentionScene.draw(
        requests, [layer], page_size=page_size, dtype=dtype, device=torch.device("cpu"), kv_dtype=kv_dtype
    )


@pytest.mark.covering
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    "special",
    [{}, {"soft_cap": 5.0}, {"sinks": torch.linspace(-3, 9, 6)}, {"value_prefix_dim": 16}],
    ids=["plain", "soft cap", "sinks", "value prefix"],
)
def test_the_result_does_not_depend_on_the_number_of_threads(kernel, num_threads, special, kv_dtype):
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
def test_scores_of_any_magnitude_are_weighted_correctly(kernel, magnitude, soft_cap):
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=16, scale=magnitude, soft_cap=soft_cap)
    scene = draw([(100, 1), (40, 20)], layer)
    out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    # The rounding error of a score, and so of a weight, grows with its size.
    tolerance = 1e-5 * max(1.0, min(magnitude, 50.0 if soft_cap else magnitude))
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [16, 48, 576])
def test_int8_products_do_not_overflow_and_keep_small_numbers(kernel, head_dim):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=1, head_dim=head_dim, scale=1 / head_dim, value_prefix_dim=16)
    scene = draw([(700, 1), (0, 1), (60, 20)], layer, dtype=torch.bfloat16, kv_dtype=torch.int8)
    q, k, _ = scene.inputs[0]
    q[0], k[0] = 3.0, -5.0  # all products have the largest possible size and one sign
    q[1, :, 1:] *= 1e-2  # most numbers are far below the largest
    out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scale", [1e10, 1e25])
def test_with_unbounded_scores_the_largest_has_all_the_weight(kernel, scale):
    """The rounding errors of such scores are far larger than the range of an exponential of a difference."""
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=16, scale=scale)
    scene = draw([(100, 1), (40, 20)], layer)
    out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("scale", [0.25, 0.0, -0.25])
def test_masked_tokens_have_no_weight_for_any_scale(kernel, scale, kv_dtype):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=16, scale=scale)
    scene = draw([(20, 1), (3, 1), (5, 30)], layer, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    scene = scene.with_input("q", slice(0, 1), 0.0)  # relative to the largest number, which is 0
    out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=2e-2, atol=2e-2)


@pytest.fixture(params=[True, False], ids=["matrix units", "none"])
def attend(request, kernel):
    """Compute attention in both ways of a machine with AMX; return the outputs of a scene's first layer."""
    return lambda scene: scene.run(
        lambda context: NativePagedAttention(context, kernel, matrix_units=request.param)
    ).outputs[0]


def check(attend, requests, layer, **options):
    """Compare with a float64 computation; the kernel rounds intermediate results to bfloat16."""
    scene = draw(requests, layer, dtype=torch.bfloat16, **options)
    torch.testing.assert_close(attend(scene), scene.run(ReferenceAttention).outputs[0], rtol=2e-2, atol=2e-2)


SPECIALS = {
    "plain": {},
    "window": {"sliding_window": 45},
    "narrow window": {"sliding_window": 3},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.linspace(-3, 9, 6)},
    "value prefix": {"value_prefix_dim": 16},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.3},
    "negative scale and soft cap": {"scale": -0.3, "soft_cap": 2.0},
    "window and sinks": {"sliding_window": 45, "sinks": torch.linspace(-3, 9, 6)},
}


@pytest.mark.covering
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("special", SPECIALS)
def test_every_kind_of_layer_is_right_on_whole_and_partial_tiles(attend, special, kv_dtype):
    layer = AttentionLayer(0, **{"num_heads": 6, "num_kv_heads": 2, "head_dim": 48, "scale": 0.2} | SPECIALS[special])
    check(attend, [(700, 1), (0, 2), (31, 33), (200, 150), (300, 5)], layer, page_size=16, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 576])
def test_every_head_size_and_value_size_is_right(attend, head_dim, kv_dtype):
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5)
    check(attend, [(0, 21), (250, 40)], layer, page_size=8, kv_dtype=kv_dtype)


@pytest.mark.parametrize("num_tokens", [*range(2, 35), 47, 48, 49, 63, 64, 65])
def test_every_number_of_rows_is_right(attend, num_tokens):
    layer = AttentionLayer(0, num_heads=1, num_kv_heads=1, head_dim=16, scale=0.25)
    check(attend, [(9, num_tokens)], layer)


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("context", [1, 30, 31, 32, 33, 63, 64, 65, 254, 255, 256, 257, 288, 511, 512, 513])
def test_every_context_length_is_right(attend, context, window):
    layer = AttentionLayer(0, num_heads=3, num_kv_heads=1, head_dim=32, scale=0.2, sliding_window=window)
    check(attend, [(context, 13)], layer)


@pytest.mark.parametrize("group", [1, 3, 5, 16, 33, 400])
def test_every_number_of_query_heads_per_key_head_is_right(attend, group):
    layer = AttentionLayer(0, num_heads=group, num_kv_heads=1, head_dim=16, scale=0.25)
    check(attend, [(40, 3), (0, 20)], layer)


@pytest.mark.covering
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("group", [1, 2, 3, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("page_size", [1, 16, 40])
def test_one_token_is_right_for_every_number_of_query_heads_per_key_head(attend, page_size, group, kv_dtype):
    layer = AttentionLayer(0, num_heads=2 * group, num_kv_heads=2, head_dim=32, scale=0.2)
    check(attend, [(63, 1), (200, 1), (20, 1), (143, 1)], layer, page_size=page_size, kv_dtype=kv_dtype)


@pytest.mark.covering
@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("group", [3, 16])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["bfloat16", "int8"])
def test_one_token_is_right_for_every_kind_of_layer(attend, special, group, kv_dtype):
    options = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": 64, "scale": 0.2} | SPECIALS[special]
    if "value_prefix_dim" in options:
        options["value_prefix_dim"] = 32
    if "sinks" in options:
        options["sinks"] = torch.linspace(-3, 9, 2 * group)
    if options.get("sliding_window") == 45:
        options["sliding_window"] = 145  # long enough for AMX, and not at the start of a tile
    check(attend, [(700, 1), (1300, 1), (99, 1)], AttentionLayer(0, **options), page_size=16, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("head_dim", "prefix"), [(32, None), (96, None), (128, None), (160, 32), (256, None), (576, 512)]
)
def test_one_token_is_right_for_every_head_size_and_value_size(attend, head_dim, prefix):
    layer = AttentionLayer(
        0, num_heads=6, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5, value_prefix_dim=prefix
    )
    check(attend, [(250, 1), (63, 1)], layer, page_size=16)


@pytest.mark.parametrize("page_size", [7, 16])
@pytest.mark.parametrize("context", [62, 63, 64, 79, 80, 81, 127, 128, 254, 255, 256, 512, 513, 600])
def test_one_token_is_right_for_every_context_length(attend, context, page_size):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2)
    check(attend, [(context, 1)], layer, page_size=page_size)


def test_a_later_and_larger_score_rescales_the_sums_of_one_token(attend):
    """The larger score is in a later tile, and only for some heads, so that the sums of other heads stay."""
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=32, scale=1.0)
    scene = draw([(70, 1), (150, 1), (0, 100)], layer, dtype=torch.bfloat16, page_size=16)
    scene.inputs[0].q[:2, ::3] *= 4.0
    scene = scene.with_input("k", slice(0, 2), 3.0)
    torch.testing.assert_close(attend(scene), scene.run(ReferenceAttention).outputs[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
@pytest.mark.parametrize("context", [100, 2000])
def test_one_token_is_right_with_a_sink_far_from_its_scores(attend, context, sink):
    """The context is in one piece or in several; only the first piece has the sink."""
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2, sinks=torch.full((6,), sink))
    check(attend, [(context, 1)], layer, page_size=16)


def test_amx_is_used_for_one_token_if_available(kernel):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125)
    scene = draw([(300 + i, 1) for i in range(40)], layer, dtype=torch.bfloat16)
    on_units, without = (
        scene.run(lambda context, use=use: NativePagedAttention(context, kernel, matrix_units=use)).outputs[0]
        for use in (True, False)
    )
    # both paths round at different places
    assert torch.equal(on_units, without) != bool(kernel.graftlm_has_matrix_units())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_token_with_nan_does_not_affect_others(attend, number):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2)
    scene = draw([(90, 1), (120, 1)], layer, dtype=torch.bfloat16, page_size=16)
    out, odd = attend(scene), attend(scene.with_input("q", slice(0, 1), number))
    assert odd[0].isnan().all()
    torch.testing.assert_close(odd[1], out[1], rtol=0, atol=0)


@pytest.mark.parametrize("num_threads", [1, 2, 64])
def test_the_result_does_not_depend_on_the_block_size(attend, num_threads):
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125)
    scene = draw([(100, 400), (0, 131)], layer, dtype=torch.bfloat16, page_size=16)
    expected = scene.run(ReferenceAttention).outputs[0]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        out = attend(scene)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scale", [1e10, -1e10, 1e25])
def test_in_a_chunk_the_largest_of_unbounded_scores_has_all_the_weight(attend, scale):
    """If the subtraction were fused with the product, the difference from the largest score would be its rounding
    error.
    """
    layer = AttentionLayer(0, num_heads=6, num_kv_heads=2, head_dim=16, scale=scale)
    scene = draw([(40, 20)], layer, dtype=torch.bfloat16)
    torch.testing.assert_close(attend(scene), scene.run(ReferenceAttention).outputs[0], rtol=1e-2, atol=1e-2)


def test_in_a_chunk_a_later_and_larger_score_takes_the_weight(attend):
    """The larger scores are in later spans, so that sums are rescaled, and only in some rows."""
    layer = AttentionLayer(0, num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0)
    scene = draw([(700, 40)], layer, dtype=torch.bfloat16).with_input("k", slice(20, 21), 30.0)
    scene = scene.with_input("q", slice(25, 26), 4.0)
    torch.testing.assert_close(attend(scene), scene.run(ReferenceAttention).outputs[0], rtol=2e-2, atol=2e-2)


def test_scores_of_minus_infinity_have_no_weight(attend):
    layer = AttentionLayer(0, num_heads=2, num_kv_heads=1, head_dim=16, scale=0.5)
    scene = draw([(40, 40)], layer, dtype=torch.bfloat16)
    scene = scene.with_input("q", slice(0, 40), 1.0).with_input("k", slice(3, 4), float("-inf"))
    out = attend(scene)
    # Its own key: earlier tokens do not see it, and from the next token on others have all the weight.
    assert out.isfinite().all()
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=2e-2, atol=2e-2)


def test_amx_is_used_for_chunks_if_available(kernel):
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
    scene = draw([(0, 300)], layer, dtype=torch.bfloat16)
    on_units, without = (
        scene.run(lambda context, use=use: NativePagedAttention(context, kernel, matrix_units=use)).outputs[0]
        for use in (True, False)
    )
    # both paths round at different places
    assert torch.equal(on_units, without) != bool(kernel.graftlm_has_matrix_units())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_chunk_rows_with_nan_do_not_affect_others(attend, number):
    scene = draw([(20, 60), (0, 50)], dtype=torch.bfloat16)
    out, odd = attend(scene), attend(scene.with_input("q", slice(30, 32), number))
    assert odd[30:32].isnan().all()
    kept = [i for i in range(110) if i not in (30, 31)]
    torch.testing.assert_close(odd[kept], out[kept], rtol=0, atol=0)


def test_many_threads_share_a_long_context_without_an_empty_piece(kernel):
    """The context has 509 pieces of 256 tokens and one token more; with rounding up, 508 pieces are enough."""
    layer = AttentionLayer(0, num_heads=8, num_kv_heads=1, head_dim=16, scale=0.25)
    scene = draw([(509 * 256, 1)], layer, page_size=64).with_input("q", slice(0, 1), 8.0)
    scene.store.keys(0).fill_(-8.0)  # scores of -256: below any value that an empty piece might use as its maximum
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(128)
        out = scene.run(lambda context: NativePagedAttention(context, kernel)).outputs[0]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=1e-5, atol=1e-5)


def test_nan_of_a_request_appears_in_its_output(kernel):
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
def test_an_obstacle_is_reported(dtype, head_dim, device, reason):
    layer = AttentionLayer(0, num_heads=2, num_kv_heads=1, head_dim=head_dim, scale=1.0)
    context = replace(draw([(0, 1)], dtype=dtype).context, layers=[layer], dtype=dtype, device=torch.device(device))
    obstacle = native_obstacle(context)
    assert obstacle is None if reason is None else reason in obstacle


def test_wrong_tensors_are_refused(kernel):
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


def test_torch_and_the_kernel_use_one_openmp_runtime(kernel):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(runtimes) == 1


def test_the_kit_finds_a_backend_that_ignores_the_window(kernel):
    class Forgetful(AttentionBackendConformance):
        parameters: ClassVar = {name: values[:2] for name, values in AttentionBackendConformance.parameters.items()}

        def create(self, context):
            layers = [replace(layer, sliding_window=None) for layer in context.layers]
            return NativePagedAttention(replace(context, layers=layers), kernel)

    failed = {result.name.split("[")[0] for result in run_conformance(Forgetful) if result.error is not None}
    assert "test_a_query_sees_exactly_its_window" in failed
    assert "test_random_batches_match_the_oracle" not in failed
