"""For every format, numbers that the test packs by the format's definition are decoded to the right weights."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from graftlm.checkpoint import iter_weights, load_model_config
from graftlm.errors import ModelError, WeightError

OUTPUTS, INPUTS, GROUP = 32, 64, 16
GROUPS = INPUTS // GROUP
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 8}
MODULE = "model.layers.0.mlp.up_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose number is in nibble i


def pack(numbers, bits, order=None):
    """Pack the columns of [R, C] into words, the first (or `order[0]`) in the lowest bits; int32 [R, ceil(C / per
    word)].
    """
    per_word = 32 // bits
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // per_word)), dtype=np.uint32)
    for column in range(numbers.shape[1]):
        word, place = divmod(column, per_word)
        place = place if order is None else order.index(place)
        words[:, word] |= numbers[:, column].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def expected_weight(codes, scales, zeros, groups):
    """Return scale * (code - zero), [N, K]; scales and zeros [N, G]."""
    weight = np.empty(codes.shape, dtype=np.float32)
    for k, g in enumerate(groups):
        weight[:, k] = scales[:, g].astype(np.float32) * (codes[:, k].astype(np.float32) - zeros[:, g])
    return torch.from_numpy(weight)


def draw(bits, seed=0, first_zero=None):
    """Draw codes [N, K], scales and zeros [N, G]."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (OUTPUTS, INPUTS))
    zeros = rng.integers(0, 2**bits, (OUTPUTS, GROUPS))
    if first_zero is not None:
        zeros[0, 0] = first_zero
    return codes, rng.uniform(0.01, 0.1, (OUTPUTS, GROUPS)).astype(np.float16), zeros


def write(folder, settings, tensors, **files):
    (folder / "config.json").write_text(json.dumps(CONFIG | ({} if settings is None else settings)))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    save_file(
        {f"{MODULE}.{part}": tensor.contiguous() for part, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def gptq(bits=4, *, ordered=False, zero_offset=1):
    """Return the tensors of one weight in GPTQ's format, and the weight."""
    codes, scales, zeros = draw(bits, first_zero=0)
    groups = np.arange(INPUTS) // GROUP
    if ordered:
        groups = np.random.default_rng(1).permutation(groups)
    stored = (zeros - zero_offset) % 2**bits
    tensors = {
        "qweight": pack(codes, bits).t(),
        "qzeros": pack(stored.T, bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return tensors, expected_weight(codes, scales, zeros, groups)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("stored_as", "zero_offset"), [(None, 1), ("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq_weights_are_decoded(tmp_path, bits, stored_as, zero_offset, ordered):
    tensors, weight = gptq(bits, ordered=ordered, zero_offset=zero_offset)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered}
    if stored_as is not None:
        settings["checkpoint_format"] = stored_as
    write(tmp_path, {"quantization_config": settings}, tensors)
    ((name, got),) = iter_weights(tmp_path)
    assert name == f"{MODULE}.weight"
    assert torch.equal(got, weight)


def test_gptq_without_activation_order_ignores_group_indices(tmp_path):
    tensors, weight = gptq()
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
    write(tmp_path, {"quantization_config": settings}, tensors | {"g_idx": torch.zeros(INPUTS, dtype=torch.int32)})
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], weight)


def test_the_last_group_may_be_shorter(tmp_path):
    codes, scales, zeros = draw(4)
    groups = np.arange(INPUTS) // 20  # 20, 20, 20, 4
    tensors = {
        "qweight": pack(codes, 4).t(),
        "qzeros": pack(zeros.T, 4),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 20, "checkpoint_format": "gptq_v2"}
    write(tmp_path, {"quantization_config": settings}, tensors)
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], expected_weight(codes, scales, zeros, groups))


def test_gptq_reads_a_layers_other_bit_width_from_its_tensors(tmp_path):
    tensors, weight = gptq(8)
    write(tmp_path, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP}}, tensors)
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], weight)


def awq():
    codes, scales, zeros = draw(4)
    tensors = {
        "qweight": pack(codes.T, 4, AWQ_ORDER),
        "qzeros": pack(zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return tensors, expected_weight(codes, scales, zeros, np.arange(INPUTS) // GROUP)


AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def test_awq_weights_are_decoded(tmp_path):
    tensors, weight = awq()
    write(tmp_path, {"quantization_config": AWQ_SETTINGS}, tensors)
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], weight)


@pytest.mark.parametrize(
    ("make", "name", "settings"),
    [
        (gptq, "quantize_config", {"bits": 4, "group_size": GROUP, "desc_act": False}),
        (awq, "quant_config", {"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_settings_in_the_separate_file_of_older_tools_are_read(tmp_path, make, name, settings):
    tensors, weight = make()
    write(tmp_path, None, tensors, **{name: settings})
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], weight)


def compressed(name, weights=None, **settings):
    group = {"targets": ["Linear"], "weights": weights or {}, "format": name}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}, **settings}


SHAPES = ([2], 8, [2.0, 8.0], [2, -8], [2, 0], [[2, 8]])  # neither number is the number of outputs or inputs


def packed_zeros(words, shape):
    return {
        "weight_packed": torch.zeros(2, words, dtype=torch.int32),
        "weight_shape": torch.tensor(shape),
        "weight_scale": torch.ones(1),
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros_as", [None, "packed", "int8"])
@pytest.mark.parametrize("num_groups", [1, GROUPS])
@pytest.mark.parametrize("ordered", [False, True])
def test_packed_compressed_tensors_are_decoded(tmp_path, bits, zeros_as, num_groups, ordered):
    codes, scales, zeros = draw(bits)
    middle = 2 ** (bits - 1)
    scales, zeros = scales[:, :num_groups].copy(), zeros[:, :num_groups].copy()
    if zeros_as is None:
        zeros[:] = middle
    groups = np.arange(INPUTS) * num_groups // INPUTS
    if ordered:
        groups = np.random.default_rng(1).permutation(groups)
    tensors = {
        "weight_packed": pack(codes, bits),
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
        "weight_scale": torch.from_numpy(scales),
    }
    if zeros_as == "packed":
        tensors["weight_zero_point"] = pack(zeros.T, bits).t()
    elif zeros_as == "int8":
        tensors["weight_zero_point"] = torch.from_numpy(zeros - middle).to(torch.int8)
    if ordered:
        tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    write(tmp_path, {"quantization_config": compressed("pack-quantized")}, tensors)
    got = dict(iter_weights(tmp_path))
    assert list(got) == [f"{MODULE}.weight"]
    assert torch.equal(got[f"{MODULE}.weight"], expected_weight(codes, scales, zeros, groups))


def test_group_indices_that_were_never_set_are_ignored(tmp_path):
    codes, scales, _ = draw(4)
    tensors = {
        "weight_packed": pack(codes, 4),
        "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
        "weight_scale": torch.from_numpy(scales),
        "weight_g_idx": torch.full((INPUTS,), -1, dtype=torch.int32),
    }
    write(tmp_path, {"quantization_config": compressed("pack-quantized")}, tensors)
    expected = expected_weight(codes, scales, np.full_like(scales, 8), np.arange(INPUTS) // GROUP)
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], expected)


def test_scales_of_keys_and_values_are_ignored(tmp_path):
    settings = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": {}}
    write(tmp_path, {"quantization_config": settings}, {"weight": torch.ones(2, 2), "k_scale": torch.ones(1)})
    assert [name for name, _ in iter_weights(tmp_path)] == [f"{MODULE}.weight"]


def test_a_packed_row_may_end_within_a_word(tmp_path):
    codes = np.random.default_rng(0).integers(0, 16, (3, 13))
    tensors = {
        "weight_packed": pack(codes, 4),
        "weight_shape": torch.tensor([3, 13]),
        "weight_scale": torch.ones(3, 1),
    }
    write(tmp_path, {"quantization_config": compressed("pack-quantized")}, tensors)
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], torch.from_numpy(codes - 8).float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale_shape", [(1,), (), (OUTPUTS,), (OUTPUTS, 1), (OUTPUTS, GROUPS)])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_unpacked_compressed_tensors_are_decoded(tmp_path, dtype, scale_shape, has_zeros):
    draw_ = torch.Generator().manual_seed(0)
    codes = torch.randint(-100, 100, (OUTPUTS, INPUTS), generator=draw_).to(dtype)
    scales = torch.rand(scale_shape, generator=draw_).bfloat16()
    zeros = torch.randint(-100, 100, scale_shape, generator=draw_).to(torch.int8) * has_zeros
    name = "int-quantized" if dtype == torch.int8 else "float-quantized"
    tensors = {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}
    if has_zeros:
        tensors["weight_zero_point"] = zeros
    write(tmp_path, {"quantization_config": compressed(name)}, tensors)
    got = dict(iter_weights(tmp_path))
    assert list(got) == [f"{MODULE}.weight"]

    def spread(values):
        grid = values.float().reshape(-1, values.shape[-1] if values.dim() == 2 else 1).expand(OUTPUTS, -1)
        return grid.repeat_interleave(INPUTS // grid.shape[1], dim=1)

    assert torch.equal(got[f"{MODULE}.weight"], (codes.float() - spread(zeros)) * spread(scales))


def fp8_blocks(outputs, inputs, block):
    draw_ = torch.Generator().manual_seed(0)
    codes = torch.randn(outputs, inputs, generator=draw_).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // block[0]), -(-inputs // block[1]), generator=draw_)
    weight = torch.empty(outputs, inputs)
    for i in range(outputs):
        for j in range(inputs):
            weight[i, j] = codes[i, j].float() * scales[i // block[0], j // block[1]]
    return codes, scales, weight


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 48), (20, 30)])
def test_fp8_blocks_are_decoded_also_if_the_last_is_incomplete(tmp_path, outputs, inputs):
    codes, scales, weight = fp8_blocks(outputs, inputs, (16, 8))
    settings = {"quant_method": "fp8", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}
    write(tmp_path, {"quantization_config": settings}, {"weight": codes, "weight_scale_inv": scales})
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], weight)


def test_fp8_blocks_of_compressed_tensors_are_decoded(tmp_path):
    codes, scales, weight = fp8_blocks(20, 30, (16, 8))
    settings = compressed("float-quantized", {"strategy": "block", "block_structure": [16, 8]})
    write(tmp_path, {"quantization_config": settings}, {"weight": codes, "weight_scale": scales})
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], weight)


def test_fp8_blocks_decode_as_in_transformers(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes, scales, _ = fp8_blocks(32, 48, (16, 8))
    settings = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    write(tmp_path, {"quantization_config": settings}, {"weight": codes, "weight_scale_inv": scales})
    oracle = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], oracle)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_fp8_with_one_scale_is_decoded(tmp_path, name):
    codes = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    write(
        tmp_path,
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        {"weight": codes, name: torch.tensor(0.5), "input_scale": torch.tensor(2.0)},
    )
    got = dict(iter_weights(tmp_path))
    assert list(got) == [f"{MODULE}.weight"]
    assert torch.equal(got[f"{MODULE}.weight"], codes.float() / 2)


@pytest.mark.parametrize(
    "settings",
    [AWQ_SETTINGS, compressed("int-quantized"), {"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}],
)
def test_plain_tensors_beside_quantized_ones_are_unchanged(tmp_path, settings):
    plain = {"weight": torch.randn(3, 2).bfloat16(), "bias": torch.randn(3)}
    write(tmp_path, {"quantization_config": settings}, plain)
    got = dict(iter_weights(tmp_path, torch.float32))
    assert {name.rpartition(".")[2]: (it.dtype, it.tolist()) for name, it in got.items()} == {
        part: (tensor.dtype, tensor.tolist()) for part, tensor in plain.items()
    }


def test_the_tensors_of_a_weight_may_be_in_several_files(tmp_path):
    tensors, weight = gptq()
    write(tmp_path, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP}}, {})
    (tmp_path / "model.safetensors").unlink()
    for part, tensor in tensors.items():
        save_file({f"{MODULE}.{part}": tensor.contiguous()}, tmp_path / f"{part}.safetensors")
    index = {"weight_map": {f"{MODULE}.{part}": f"{part}.safetensors" for part in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ((name, got),) = iter_weights(tmp_path)
    assert name == f"{MODULE}.weight"
    assert torch.equal(got, weight)


def test_weights_are_decoded_to_the_requested_dtype_with_a_log_line(tmp_path, caplog):
    tensors, weight = awq()
    write(tmp_path, {"quantization_config": AWQ_SETTINGS}, tensors)
    read_bytes = []
    with caplog.at_level(logging.INFO, "graftlm"):
        got = dict(iter_weights(tmp_path, torch.bfloat16, on_read=read_bytes.append))
    assert torch.equal(got[f"{MODULE}.weight"], weight.bfloat16())
    assert "1 quantized weights of the checkpoint (AWQ, 4 bits) were decoded to bfloat16" in caplog.text
    assert read_bytes == [sum(tensor.nbytes for tensor in tensors.values())]


def test_a_model_gets_the_configuration_without_quantization(tmp_path):
    write(tmp_path, {"quantization_config": AWQ_SETTINGS}, {})
    assert load_model_config(tmp_path).raw == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, rf"lacks '{MODULE}.scales', but has qweight \[64, 4\] int32"),
        ({"qzeros": torch.zeros(GROUPS, 3, dtype=torch.int32)}, r"zeros must .* It has .*qzeros \[4, 3\] int32"),
        ({"qweight": torch.zeros(INPUTS, 4)}, "matrix of int32, got .* float32"),
        ({"qweight": torch.zeros(INPUTS, 5, dtype=torch.int32)}, "scales must have 1 or 40 rows"),
        ({"qweight": torch.zeros(INPUTS + 1, 4, dtype=torch.int32)}, "65 inputs cannot be divided into 4 groups"),
        ({"scales": torch.zeros(OUTPUTS)}, "scales must be a matrix"),
    ],
)
def test_tensors_that_do_not_match_each_other_are_reported(tmp_path, change, message):
    tensors, _ = awq()
    kept = {part: tensor for part, tensor in (tensors | change).items() if tensor is not None}
    write(tmp_path, {"quantization_config": AWQ_SETTINGS}, kept)
    with pytest.raises(WeightError, match=message):
        list(iter_weights(tmp_path))


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, gptq()[0] | {"g_idx": torch.full((INPUTS,), 4)}, "each of 64 inputs"),
        ({"quant_method": "gptq", "bits": 4}, gptq()[0] | {"g_idx": torch.zeros(3)}, "each of 64 inputs"),
        ({"quant_method": "gptq", "bits": 4}, gptq()[0] | {"qzeros": torch.zeros(4, 3).int()}, "qzeros must have"),
        (
            compressed("pack-quantized"),
            {
                "weight_packed": torch.zeros(2, 3).int(),
                "weight_shape": torch.tensor([2, 8]),
                "weight_scale": torch.ones(1),
            },
            "8 numbers of one of",
        ),
        (
            compressed("pack-quantized"),
            packed_zeros(1, [2, 8]) | {"weight_zero_point": torch.zeros(1, 1, 1).int()},
            "weight_zero_point must be a matrix",
        ),
        (compressed("pack-quantized"), packed_zeros(1, [3, 8]), "weight_packed must have 3 rows"),
        *[
            (compressed("pack-quantized"), packed_zeros(1, shape), "weight_shape must be two integers")
            for shape in SHAPES
        ],
        (
            {"quant_method": "gptq", "bits": 4},
            gptq()[0] | {"qweight": torch.zeros(0, OUTPUTS).int()},
            "must be a non-empty matrix",
        ),
        (AWQ_SETTINGS, awq()[0] | {"qweight": torch.zeros(0, 0).int()}, "must be a non-empty matrix"),
        ({"quant_method": "gptq", "bits": 4}, gptq()[0] | {"scales": torch.ones(GROUPS, OUTPUTS).int()}, "floating"),
        (
            {"quant_method": "fp8", "weight_block_size": [16, 8]},
            {"weight": torch.zeros(16, 16).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 3)},
            r"blocks of 16 x 8 need scales of \[1, 2\]",
        ),
        ({"quant_method": "fp8"}, {"weight": torch.zeros(4, 4), "weight_scale": torch.ones(1)}, "matrix of bytes"),
        (
            {"quant_method": "fp8"},
            {"weight": torch.zeros(2, 4, 4).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)},
            r"must be a matrix, got \[2, 4, 4\]",
        ),
    ],
)
def test_tensors_that_violate_the_format_are_reported(tmp_path, settings, tensors, message):
    write(tmp_path, {"quantization_config": settings}, tensors)
    with pytest.raises(WeightError, match=message):
        list(iter_weights(tmp_path))


def fp8():
    codes, scales, weight = fp8_blocks(32, 48, (16, 8))
    return {"weight": codes, "weight_scale_inv": scales}, weight


def packed():
    return packed_zeros(1, [2, 8]) | {"weight_scale": torch.ones(2, 1)}, torch.zeros(2, 8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize(
    ("settings", "make", "part"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq, "scales"),
        (AWQ_SETTINGS, awq, "scales"),
        ({"quant_method": "fp8", "weight_block_size": [16, 8]}, fp8, "weight_scale_inv"),
        (compressed("pack-quantized"), packed, "weight_scale"),
    ],
)
def test_scales_may_be_zero_and_must_be_finite(tmp_path, settings, make, part, value):
    tensors = make()[0]
    tensors[part][0, 0] = value
    write(tmp_path, {"quantization_config": settings}, tensors)
    if value == 0:
        (weight,) = dict(iter_weights(tmp_path)).values()
        assert weight[0, 0] == 0
        return
    with pytest.raises(WeightError, match=rf"'{MODULE}' does not match .*: scales must be finite"):
        list(iter_weights(tmp_path))


@pytest.mark.parametrize("size", [10**3, 10**12, 10**30])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_block_larger_than_the_weight_covers_the_whole_weight(tmp_path, size, axis):
    block = [16, 8]
    block[axis] = size
    codes, scales, weight = fp8_blocks(32, 48, block)
    settings = {"quant_method": "fp8", "weight_block_size": block}
    write(tmp_path, {"quantization_config": settings}, {"weight": codes, "weight_scale_inv": scales})
    assert torch.equal(dict(iter_weights(tmp_path))[f"{MODULE}.weight"], weight)


@pytest.mark.parametrize("group_size", [INPUTS, 10**12, 10**30])
def test_a_group_larger_than_the_inputs_is_one_group(tmp_path, group_size):
    tensors, _ = gptq()
    tensors |= {"qzeros": tensors["qzeros"][:1], "scales": tensors["scales"][:1]}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": False}
    write(tmp_path, {"quantization_config": settings}, tensors)
    got = dict(iter_weights(tmp_path))[f"{MODULE}.weight"]
    codes, scales, zeros = draw(4, first_zero=0)
    assert torch.equal(got, expected_weight(codes, scales[:, :1], zeros[:, :1], [0] * INPUTS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["gptq"], "must be an object"),
        ({"quant_method": "gptq", "bits": 3}, "bits must be one of"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "integers above 0 for group_size"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin', which is not supported"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "'marlin', which is not supported"),
        ({"quant_method": "awq", "bits": 8}, "bits must be 4"),
        (AWQ_SETTINGS | {"version": "gemv"}, "kernel 'gemv'"),
        (AWQ_SETTINGS | {"zero_point": False}, "no zero points"),
        (compressed("nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (compressed("marlin-24"), "'marlin-24'"),
        (compressed("pack-quantized", sparsity_config={"format": "sparse-24-bitmask"}), "'sparse-24-bitmask'"),
        (compressed("pack-quantized", transform_config={"config_groups": {"u": {}}}), "'transform_config'"),
        (compressed("pack-quantized", sparsity_config=["dense"]), "an object for sparsity_config"),
        (compressed("pack-quantized", ["int4"]), "an object for weights"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": ["gptq"]}, "which is not supported"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {"a": {"format": "int-quantized"}, "b": {"format": "mxfp4-pack-quantized"}},
            },
            "'mxfp4-pack-quantized'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {str(n): {"weights": {"block_structure": [n, n]}} for n in (8, 16)},
            },
            "blocks of several sizes",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size as two integers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "above 0 for weight_block_size"),
    ],
)
def test_an_unsupported_format_is_refused_when_the_configuration_is_read(tmp_path, settings, message):
    write(tmp_path, {"quantization_config": settings}, {})
    with pytest.raises(ModelError, match=message):
        load_model_config(tmp_path)


@pytest.mark.parametrize("settings", [{"quant_method": "mxfp4"}, {"quant_method": ["gptq"]}, {"bits": 4}])
def test_tensors_of_an_unknown_format_are_passed_to_the_model(tmp_path, settings):
    tensors = {"blocks": torch.zeros(2, 2, dtype=torch.uint8)}
    write(tmp_path, {"quantization_config": settings}, tensors)
    assert load_model_config(tmp_path).raw["quantization_config"] == settings
    ((name, got),) = iter_weights(tmp_path)
    assert (name, got.dtype) == (f"{MODULE}.blocks", torch.uint8)
