import torch

from graftlm.checkpoint.quantized.coded_weight import CodedWeight


def test_a_weight_larger_than_a_panel_is_decoded_completely():
    num_outputs = 150_000  # rows of 8 inputs; more weights than are decoded at a time
    codes = (torch.arange(num_outputs * 8) % 251).to(torch.uint8).view(-1, 8)
    scales = torch.arange(num_outputs, dtype=torch.float32)[:, None]
    weight = CodedWeight(codes, scales, zeros=torch.full_like(scales, 3)).decoded(torch.float32)
    assert torch.equal(weight, (codes.float() - 3) * scales)
