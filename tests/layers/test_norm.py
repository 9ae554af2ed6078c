import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from graftlm.layers import GemmaQKNorm, GemmaRMSNorm, QKNorm, RMSNorm, copy_weights

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def oracle(weight: torch.Tensor, eps: float) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(len(weight), eps).to(weight.dtype)
    norm.weight.data.copy_(weight)
    return norm.requires_grad_(False)


def gemma_oracle(weight: torch.Tensor, eps: float) -> Gemma2RMSNorm:
    norm = Gemma2RMSNorm(len(weight), eps).to(weight.dtype)
    norm.weight.data.copy_(weight)
    return norm.requires_grad_(False)


@DTYPES
def test_rms_norm_rounds_like_transformers(dtype: torch.dtype) -> None:
    norm = RMSNorm(48, 1e-5, device=CPU, dtype=dtype)
    norm.weight.copy_(torch.randn(48))
    x = (torch.randn(7, 48) * 3).to(dtype)
    normed, residual = norm(x)
    assert torch.equal(normed, oracle(norm.weight, 1e-5)(x))
    assert torch.equal(residual, x)


@DTYPES
def test_rms_norm_adds_to_the_residual_stream_first(dtype: torch.dtype) -> None:
    norm = RMSNorm(48, 1e-5, device=CPU, dtype=dtype)
    norm.weight.copy_(torch.randn(48))
    x, stream = torch.randn(7, 48).to(dtype), torch.randn(7, 48).to(dtype)
    before = stream.clone()
    normed, residual = norm(x, stream)
    assert torch.equal(residual, stream + x)
    assert torch.equal(normed, oracle(norm.weight, 1e-5)(stream + x))
    assert torch.equal(stream, before)


@DTYPES
def test_head_norm_rounds_like_transformers_for_queries_and_keys(dtype: torch.dtype) -> None:
    norm = QKNorm(4, 2, 16, 1e-6, device=CPU, dtype=dtype)
    q_weight, k_weight = torch.randn(16).to(dtype), torch.randn(16).to(dtype)
    q_slot, k_slot = norm.weight_slots("")
    q_slot.target.copy_(q_weight)
    k_slot.target.copy_(k_weight)
    qk = torch.randn(5, 8, 16).to(dtype)[:, :6]  # strided, like a view of the fused projection
    got = norm(qk)
    assert torch.equal(got[:, :4], oracle(q_weight, 1e-6)(qk[:, :4]))
    assert torch.equal(got[:, 4:], oracle(k_weight, 1e-6)(qk[:, 4:]))


@DTYPES
def test_gemma_norm_rounds_like_transformers(dtype: torch.dtype) -> None:
    norm = GemmaRMSNorm(48, 1e-5, device=CPU)
    weight = torch.randn(48).to(dtype)
    copy_weights(norm.weight_slots("", "norm"), [("norm.weight", weight)])
    x, stream = (torch.randn(7, 48) * 3).to(dtype), torch.randn(7, 48).to(dtype)
    assert torch.equal(norm(x)[0], gemma_oracle(weight, 1e-5)(x))
    normed, residual = norm(x, stream)
    assert torch.equal(residual, stream + x)
    assert torch.equal(normed, gemma_oracle(weight, 1e-5)(stream + x))


@DTYPES
def test_gemma_head_norm_rounds_like_transformers_for_queries_and_keys(dtype: torch.dtype) -> None:
    norm = GemmaQKNorm(4, 2, 16, 1e-6, device=CPU)
    q_weight, k_weight = torch.randn(16).to(dtype), torch.randn(16).to(dtype)
    copy_weights(norm.weight_slots(""), [("q_norm.weight", q_weight), ("k_norm.weight", k_weight)])
    qk = torch.randn(5, 8, 16).to(dtype)[:, :6]  # strided, like a view of the fused projection
    got = norm(qk)
    assert torch.equal(got[:, :4], gemma_oracle(q_weight, 1e-6)(qk[:, :4]))
    assert torch.equal(got[:, 4:], gemma_oracle(k_weight, 1e-6)(qk[:, 4:]))
