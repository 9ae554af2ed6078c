from graftlm.checkpoint import iter_weights
from graftlm.testing.sparse_checkpoint import LlamaShape, write_sparse_checkpoint

SHAPE = LlamaShape(64, 96, 2, 4, 2, 16, 4096)


def test_weights_are_zeros_and_use_no_disk_space(tmp_path):
    weights = dict(iter_weights(write_sparse_checkpoint(tmp_path, SHAPE)))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == dict(SHAPE.tensors())
    assert sum(tensor.nbytes for tensor in weights.values()) == SHAPE.weight_bytes
    assert not any(tensor.any() for tensor in weights.values())
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < SHAPE.weight_bytes / 10


def test_the_large_shape_of_the_gpu_check_has_eight_billion_weights():
    shape = LlamaShape(4096, 14336, 32, 32, 8, 128, 128256)
    assert shape.weight_bytes // 2 == 8_030_261_248
    assert shape.kv_bytes_per_token == 131072
