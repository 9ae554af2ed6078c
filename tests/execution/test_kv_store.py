from dataclasses import replace

import pytest
import torch

from graftlm.contracts import AttentionLayer
from graftlm.execution.kv_store import KVStore

LAYERS = [
    AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0),
    AttentionLayer(layer_id=1, num_heads=4, num_kv_heads=4, head_dim=16, scale=1.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_has_contiguous_pages_of_its_shape(dtype: torch.dtype) -> None:
    store = KVStore(LAYERS, num_pages=5, page_size=3, dtype=dtype, device=torch.device("cpu"))
    for layer in LAYERS:
        for tensor in (store.keys(layer.layer_id), store.values(layer.layer_id)):
            assert tensor.shape == (5, 3, layer.num_kv_heads, layer.head_dim)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()


def test_layers_with_a_window_may_have_fewer_pages() -> None:
    layers = [LAYERS[0], replace(LAYERS[1], sliding_window=8)]
    store = KVStore(layers, 50, 4, torch.float32, torch.device("cpu"), num_window_pages=3)
    assert [len(store.keys(i)) for i in (0, 1)] == [len(store.values(i)) for i in (0, 1)] == [50, 3]
    unsplit = KVStore(layers, 50, 4, torch.float32, torch.device("cpu"))
    assert unsplit.num_bytes - store.num_bytes == KVStore.bytes_per_token(layers[1:], torch.float32) * 4 * 47


def test_keys_and_values_of_all_layers_are_separate_and_keep_their_addresses() -> None:
    store = KVStore(LAYERS, num_pages=2, page_size=1, dtype=torch.float32, device=torch.device("cpu"))
    tensors = [take(layer.layer_id) for layer in LAYERS for take in (store.keys, store.values)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    again = [take(layer.layer_id) for layer in LAYERS for take in (store.keys, store.values)]
    assert [tensor.unique().tolist() for tensor in again] == [[0.0], [1.0], [2.0], [3.0]]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 640), (torch.bfloat16, 320)])
def test_bytes_per_token_equals_the_allocated_size(dtype: torch.dtype, expected: int) -> None:
    assert KVStore.bytes_per_token(LAYERS, dtype) == expected
    store = KVStore(LAYERS, num_pages=7, page_size=4, dtype=dtype, device=torch.device("cpu"))
    assert store.num_bytes == expected * 7 * 4


def test_spare_pages_are_added_in_every_memory_without_changing_page_bytes() -> None:
    layers = [LAYERS[0], replace(LAYERS[1], sliding_window=8)]
    store = KVStore(layers, 50, 4, torch.float32, torch.device("cpu"), num_window_pages=3, spare_pages=1)
    assert [len(store.keys(i)) for i in (0, 1)] == [len(store.values(i)) for i in (0, 1)] == [51, 4]
    assert (store.num_pages, store.num_window_pages, store.has_window_memory) == (50, 3, True)
    assert store.page_bytes == KVStore.bytes_per_token(layers, torch.float32) * 4


LATENT = AttentionLayer(layer_id=0, num_heads=4, num_kv_heads=1, head_dim=24, scale=1.0, value_prefix_dim=16)


def test_values_that_are_a_prefix_of_the_keys_take_no_memory() -> None:
    layers = [LATENT, LAYERS[1]]
    store = KVStore(layers, num_pages=5, page_size=3, dtype=torch.float32, device=torch.device("cpu"))
    keys, values = store.keys(0), store.values(0)
    assert (keys.shape, values.shape) == ((5, 3, 1, 24), (5, 3, 1, 16))
    assert values.data_ptr() == keys.data_ptr()
    assert [len(store.stored(i)) for i in (0, 1)] == [1, 2]
    assert all(tensor.is_contiguous() for i in (0, 1) for tensor in store.stored(i))
    keys.copy_(torch.randn(keys.shape))
    assert torch.equal(values, keys[..., :16])
    per_token = (24 + 2 * 4 * 16) * 4
    assert KVStore.bytes_per_token(layers, torch.float32) == per_token
    assert (store.page_bytes, store.num_bytes) == (3 * per_token, 5 * 3 * per_token)


@pytest.mark.parametrize(("dtype", "per_row"), [(torch.int8, 2), (torch.float8_e4m3fn, 0)])
def test_eight_bit_types_take_one_byte_per_number_and_int8_one_scale_per_row(dtype: torch.dtype, per_row: int) -> None:
    layers = [LATENT, replace(LAYERS[1], sliding_window=8)]
    store = KVStore(layers, 5, 3, dtype, torch.device("cpu"), num_window_pages=2)
    per_token = [24 + per_row, 2 * 4 * (16 + per_row)]
    assert KVStore.bytes_per_token(layers, dtype) == sum(per_token)
    assert (store.page_bytes, store.num_bytes) == (3 * sum(per_token), 3 * (5 * per_token[0] + 2 * per_token[1]))
    if not per_row:
        assert store.key_scales(0) is store.value_scales(0) is None
        return
    assert store.key_scales(0) is store.value_scales(0)  # values that are a part of the keys
    assert (store.key_scales(1).shape, store.value_scales(1).dtype) == ((2, 3, 4), torch.bfloat16)
    assert [len(store.stored(i)) for i in (0, 1)] == [2, 4]
    assert all(tensor.is_contiguous() for i in (0, 1) for tensor in store.stored(i))
