import pytest
import torch

from graftlm.checkpoint.tensor_memory import map_tensors, parse_dtype, place_tensors, tensor_at
from graftlm.errors import RequestError

TENSORS = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "matrix": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 5),
    "eighth": torch.arange(5).to(torch.float8_e4m3fn),
}


def test_written_tensors_are_mapped_by_another_reader(tmp_path):
    dtypes = [str(tensor.dtype) for tensor in TENSORS.values()]
    places, num_bytes = place_tensors(list(TENSORS), dtypes, [tensor.shape for tensor in TENSORS.values()])
    memory = bytearray(num_bytes)
    for place in places:
        tensor_at(memory, place).copy_(TENSORS[place[0]])
        assert place[3] % 64 == 0
    path = tmp_path / "memory"
    path.write_bytes(memory)
    found = dict(map_tensors(str(path), places))
    path.unlink()
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float())


def test_tensors_without_elements_need_no_file():
    places, num_bytes = place_tensors(["a"], ["float32"], [[0, 3]])
    assert num_bytes == 0
    assert [(name, tensor.shape) for name, tensor in map_tensors("", places)] == [("a", (0, 3))]


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_a_dtype_may_have_its_module_in_its_name(name):
    assert parse_dtype(name) is torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], ["float33"], [[1]]), "unknown dtype 'float33'"),
        ((["a"], ["nn"], [[1]]), "unknown dtype 'nn'"),
        ((["a"], ["float32"], []), "same length, got 1, 1 and 0"),
        ((["a"], ["float32"], [[2, -1]]), r"'a' has a negative size: \[2, -1\]"),
    ],
)
def test_impossible_tensors_are_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        place_tensors(*arguments)
