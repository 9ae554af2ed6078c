import pytest
import torch

from graftlm.errors import RequestError, WeightError
from graftlm.layers import GroupedLinear, Linear, WeightSlot, copy_weights, empty_parameter, pack_linears, read_weight

CPU = torch.device("cpu")


def slots() -> list[WeightSlot]:
    fused = empty_parameter(5, 2, device=CPU, dtype=torch.float32)
    return [WeightSlot("a", fused[:3]), WeightSlot("b", fused[3:]), WeightSlot("row", torch.zeros(4, 2), per_row=True)]


def full() -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), 1.0), "b": torch.full((2, 2), 2.0), "row": torch.tensor([3.0, 4.0])}


def test_each_tensor_is_copied_to_its_rows() -> None:
    a, b, row = slots()
    copy_weights([a, b, row], full().items())
    assert (a.target == 1).all()
    assert (b.target == 2).all()
    assert (row.target == torch.tensor([3.0, 4.0])).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_are_converted_to_the_target_dtype(dtype: torch.dtype) -> None:
    a, b, row = slots()
    copy_weights([a, b, row], [(name, tensor.to(dtype)) for name, tensor in full().items()])
    assert a.target.dtype == torch.float32
    assert (a.target == 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": None}, r"lacks 'a'"),
        ({"a": None, "b": None}, r"lacks 'a', 'b'"),
        ({"c": torch.zeros(1)}, r"contains 'c'"),
        ({"a": None, "c": torch.zeros(1)}, r"lacks 'a' and contains 'c'"),
        ({"a": torch.zeros(2, 2)}, r"'a' has shape \[2, 2\].* \[3, 2\]"),
        ({"row": torch.zeros(4, 2)}, r"'row' has shape \[4, 2\].* \[2\]"),
        ({"b": torch.zeros(2, 2, dtype=torch.int8)}, r"'b' has dtype torch.int8"),
        ({f"x{i}": torch.zeros(1) for i in range(7)}, r"'x4' and 2 more"),
    ],
)
def test_a_checkpoint_with_wrong_tensors_is_refused_by_name(
    changes: dict[str, torch.Tensor | None], message: str
) -> None:
    weights = {name: tensor for name, tensor in (full() | changes).items() if tensor is not None}
    with pytest.raises(WeightError, match=message):
        copy_weights(slots(), weights.items())


def test_an_offset_is_added_in_the_dtype_of_the_target() -> None:
    target = torch.empty(2, 3)
    weight = torch.tensor([0.0, -1.0, 2.0**-12], dtype=torch.bfloat16)  # 1 + 2 ** -12 needs float32
    copy_weights([WeightSlot("a", target, per_row=True, offset=1.0)], [("a", weight)])
    assert target.tolist() == [[1.0, 0.0, 1 + 2.0**-12]] * 2


def test_a_duplicate_name_is_refused() -> None:
    with pytest.raises(WeightError, match="'a' twice"):
        copy_weights(slots(), [*full().items(), *full().items()])


def test_computed_tensors_of_old_checkpoints_are_ignored() -> None:
    places = slots()
    copy_weights(places, [*full().items(), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))])
    for slot, tensor in zip(places, full().values(), strict=True):
        assert (slot.target == tensor).all()


@pytest.mark.parametrize("names", [("b",), ("tied",), ("b", "tied"), ("tied", "b")])
def test_a_tied_tensor_may_have_either_name_or_both(names: tuple[str, ...]) -> None:
    a, b, row = slots()
    weights = full()
    tensor = weights.pop("b")
    copy_weights([a, b, row], [*weights.items(), *((name, tensor) for name in names)], aliases={"tied": "b"})
    assert (b.target == 2).all()


def test_tied_tensors_with_an_offset_are_compared_with_the_offset() -> None:
    slot, tensor = WeightSlot("a", torch.empty(3), offset=1.0), torch.arange(3.0)
    copy_weights([slot], [("a", tensor), ("tied", tensor)], aliases={"tied": "a"})
    assert slot.target.tolist() == [1, 2, 3]


def test_tied_tensors_that_differ_are_refused() -> None:
    with pytest.raises(WeightError, match=r"'tied'.*differ"):
        copy_weights(slots(), [*full().items(), ("tied", torch.zeros(2, 2))], aliases={"tied": "b"})


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_linear_layer_equals_its_separate_parts(bias: bool) -> None:
    sizes = {"q_proj": 6, "k_proj": 2, "v_proj": 4}
    linear = Linear(8, sizes, bias=bias, device=CPU, dtype=torch.float32)
    parts = {name: torch.nn.Linear(8, size, bias=bias) for name, size in sizes.items()}
    tensors = [(f"x.{name}.{key}", t) for name, part in parts.items() for key, t in part.state_dict().items()]
    copy_weights(linear.weight_slots("x."), tensors)
    x = torch.randn(3, 8)
    expected = torch.cat([part(x) for part in parts.values()], dim=-1)
    torch.testing.assert_close(linear(x), expected, check_stride=False)


def test_a_partial_update_keeps_the_other_slots() -> None:
    a, b, row = slots()
    copy_weights([a, b, row], full().items())
    copy_weights([a, b, row], [("b", torch.full((2, 2), 7.0))], partial=True)
    assert (a.target == 1).all()
    assert (b.target == 7).all()
    with pytest.raises(WeightError, match="contains 'c'"):
        copy_weights([a, b, row], [("c", torch.zeros(1))], partial=True)


def test_names_may_lack_the_prefix_of_the_model() -> None:
    slot = WeightSlot("model.a", torch.zeros(2))
    copy_weights([slot], [("a", torch.ones(2))])
    assert (slot.target == 1).all()


def test_on_the_meta_device_tensors_are_only_checked() -> None:
    slot = WeightSlot("a", torch.empty(2, device="meta"), offset=1.0)
    ties = {"b": "a"}
    copy_weights([slot], [("a", torch.ones(2)), ("b", torch.ones(2))], ties)
    with pytest.raises(WeightError, match="ties 'b'"):
        copy_weights([slot], [("a", torch.ones(2)), ("b", torch.zeros(2))], ties)
    with pytest.raises(WeightError, match="shape"):
        copy_weights([slot], [("a", torch.ones(3))], ties)


def test_a_read_weight_equals_the_loaded_one() -> None:
    a, b, row = slots()
    offset = WeightSlot("offset", torch.zeros(3), offset=1.0)
    tensors = full() | {"offset": torch.tensor([1.0, 2.0, 3.0])}
    copy_weights([a, b, row, offset], tensors.items())
    for name, tensor in tensors.items():
        found = read_weight([a, b, row, offset], name)
        assert torch.equal(found, tensor)
        found.zero_()  # it is a copy
    assert torch.equal(read_weight([a, b], "tied", {"tied": "b"}), tensors["b"])
    with pytest.raises(RequestError, match="no weight 'rov'; the nearest is 'row'"):
        read_weight([a, b, row], "rov")


def test_packed_weights_can_be_read_and_packed_again() -> None:
    layer = Linear(640, {"q": 400, "k": 240}, device=CPU, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(640, 640, generator=draw)
    copy_weights(layer.weight_slots(""), [("q.weight", plain[:400]), ("k.weight", plain[400:])])
    x = torch.randn(2, 640, generator=draw)
    for _ in range(2):
        pack_linears(layer)
        assert torch.equal(read_weight(layer.weight_slots(""), "k.weight"), plain[400:])
        pack_linears(layer)
        torch.testing.assert_close(layer(x), x @ plain.T, rtol=1e-4, atol=1e-3)


def test_packed_experts_can_be_read() -> None:
    layer = GroupedLinear(2, 640, 640, ("up",), device=CPU, dtype=torch.float32)
    plain = torch.randn(2, 640, 640, generator=torch.Generator().manual_seed(0))
    layer.weight.copy_(plain)
    layer.pack()
    layer.unpack()
    assert torch.equal(layer.weight, plain)
