"""The kernel compared with the host's filters: on a device if there is one, and in Triton's interpreter."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from graftlm.execution.sampling_filters import keep_top_k, keep_top_p, top_p_bounds_on_host

NAN, INF = float("nan"), float("inf")

#: Tables of logits; each has one vocabulary size.
TABLES = {
    "random": torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[20], [0.1], [4], [1]]),
    "of more than one turn": torch.randn(1, 4097, generator=torch.Generator().manual_seed(1)),
    "one token": torch.tensor([[3.0], [-2.0]]),
    "ties, as bfloat16 has them": torch.randn(3, 300, generator=torch.Generator().manual_seed(2)).bfloat16().float(),
    "all equal": torch.full((1, 130), -7.25),
    "both signs of zero": torch.tensor([[0.0, -0.0, 1.0, -1.0, -0.0, 0.0]]),
    "minus infinity": torch.tensor([[-INF, 2.0, -INF, 1.0, 2.0, -INF], [-INF, -INF, -INF, -INF, 0.0, -INF]]),
    "NaN beside numbers": torch.tensor([[NAN] * 5, [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, -NAN, 3.0, 2.0, NAN]]),
    "plus infinity": torch.tensor([[INF, 0.0, INF, 1.0]]),
    "numbers of any size": torch.tensor([[1e38, -1e38, 1e-45, -1e-45, 0.0, 1e-38, 3e38, -3e38]]),
}
KS = (1, 2, 3, 40, 999, 4096)
PS = (1e-30, 1e-6, 0.1, 0.5, 0.9, 0.999999, 1 - 1e-9)


def check(device, num_rounds):
    """Compare both bounds of every row of every table with those of the host, with other settings in each round."""
    from graftlm.execution.bound_kernel import kth_largest, top_p_bounds

    at = 0
    for _ in range(num_rounds):
        for name, logits in TABLES.items():
            n, vocab_size = logits.shape
            settings = np.arange(at, at := at + n)
            padded = torch.full((n, vocab_size + 3), 1e9, device=device)  # rows need not be adjacent in memory
            padded[:, :vocab_size] = logits
            k = torch.tensor(np.minimum(np.array(KS)[settings % len(KS)], vocab_size))
            expected = logits.sort(dim=1, descending=True).values.gather(1, k[:, None] - 1).squeeze(1)
            assert same(kth_largest(padded[:, :vocab_size], k.double().to(device)), expected), (name, k)
            probs, p = logits.softmax(dim=1), np.array(PS)[settings % len(PS)]
            found = top_p_bounds(probs.to(device), torch.from_numpy(p).to(device))
            assert same(found, torch.from_numpy(top_p_bounds_on_host(probs.numpy(), p))), (name, p)
        at += 1


def same(found, expected):
    return torch.allclose(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def check_weights(device):
    """Compare the bounds of weights that no softmax gives: with any sum, tiny, or with exactly half the sum in one
    half.
    """
    from graftlm.execution.bound_kernel import top_p_bounds

    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1e30, 3e30, 2e30, 0.0], [0.0] * 4, [1e-15, 3e-15, 2e-15, 1e-40]])
    top_p = np.array([0.5, 0.75, 0.5, 0.6])
    found = top_p_bounds(weights.to(device), torch.from_numpy(top_p).to(device))
    assert found.tolist() == top_p_bounds_on_host(weights.numpy(), top_p).tolist()


def test_the_interpreted_kernel_finds_the_bounds_of_the_host():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("by_share", [False, True])
def test_the_kernel_compiles_for_a_device(tmp_path, monkeypatch, by_share):
    pytest.importorskip("triton")
    from graftlm.execution import bound_kernel
    from graftlm.testing.triton_compile import compile_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tensors = {"x": "*fp32", "targets": "*fp64", "bounds": "*fp32"}
    sizes = {"row_stride": "i32", "vocab_size": "i32", "unit_bits": "i32", "BY_SHARE": by_share, "BLOCK": 4096}
    compiled = compile_kernel(bound_kernel._bound_kernel, tensors | sizes, 80, {"num_warps": 16})
    assert ".entry" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnADevice:
    def test_the_compiled_kernel_finds_the_bounds_of_the_host(self):
        check(torch.device("cuda"), num_rounds=30)
        check_weights(torch.device("cuda"))

    def test_the_filters_keep_the_same_tokens_as_on_the_host(self):
        logits = TABLES["random"]
        top_k, top_p = np.array([5, 1000, 1, 70]), np.array([0.9, 0.5, 1.0, 0.01])
        assert same(keep_top_k(logits.cuda(), top_k), keep_top_k(logits, top_k))
        probs = logits.softmax(dim=1)
        assert same(keep_top_p(probs.cuda(), top_p), keep_top_p(probs, top_p))


if __name__ == "__main__":
    check(torch.device("cpu"), num_rounds=1)
    check_weights(torch.device("cpu"))
    from graftlm.execution.bound_kernel import kth_largest

    assert len(kth_largest(torch.zeros(0, 5), torch.zeros(0, dtype=torch.float64))) == 0
    with pytest.raises(ValueError, match="columns of stride 1"):
        kth_largest(torch.zeros(4, 3).T, torch.ones(3, dtype=torch.float64))
