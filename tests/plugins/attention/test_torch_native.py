import logging
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from graftlm.contracts import API_VERSION, AttentionLayer
from graftlm.layers.kernel_build import KernelBuildError
from graftlm.testing.attention_scene import AttentionScene
from graftlm.testing.reference_attention import ReferenceAttention
from graftlm_attention import TorchNativeOptions, provide_attention_backends

(PROVIDER, *_) = provide_attention_backends()

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def scene():
    layer = AttentionLayer(0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    return AttentionScene.draw([(20, 1), (0, 9)], [layer], page_size=4, dtype=torch.float32, device=torch.device("cpu"))


def check(scene, options):
    created = []

    def create(context):
        created.append(PROVIDER.create(options, context))
        return created[0]

    out = scene.run(create).outputs[0]
    torch.testing.assert_close(out, scene.run(ReferenceAttention).outputs[0], rtol=1e-5, atol=1e-5)
    return created[0].kernel


def test_the_provider_has_the_current_api_version():
    assert (PROVIDER.name, PROVIDER.api_version) == ("torch_native", API_VERSION)


def test_importing_the_package_imports_no_torch():
    code = "import sys, graftlm_attention as a; list(a.provide_attention_backends()); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_compiler
@pytest.mark.parametrize("kernel", ["auto", "native"])
def test_the_compiled_kernel_is_used_if_it_can_be_compiled(scene, kernel_cache, kernel):
    assert check(scene, TorchNativeOptions(kernel=kernel, kernel_cache_dir=kernel_cache)) == "native"
    assert list(kernel_cache.glob("paged_attention-*.so"))


def test_torch_is_used_if_configured(scene, tmp_path):
    assert check(scene, TorchNativeOptions(kernel="torch", kernel_cache_dir=tmp_path / "cache")) == "torch"
    assert not (tmp_path / "cache").exists()


def test_without_a_compiler_auto_uses_torch_with_a_log_line(scene, tmp_path, caplog):
    options = TorchNativeOptions(compiler=str(tmp_path / "no-such-compiler"), kernel_cache_dir=tmp_path / "cache")
    with caplog.at_level(logging.INFO, logger="graftlm_attention"):
        assert check(scene, options) == "torch"
    assert "no-such-compiler" in caplog.text


def test_without_a_compiler_native_fails(scene, tmp_path):
    options = TorchNativeOptions(kernel="native", compiler=str(tmp_path / "none"), kernel_cache_dir=tmp_path)
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        PROVIDER.create(options, scene.context)


def test_an_unsupported_dtype_uses_torch(scene, tmp_path, caplog):
    context = replace(scene.context, dtype=torch.float16)
    with caplog.at_level(logging.INFO, logger="graftlm_attention"):
        assert PROVIDER.create(TorchNativeOptions(), context).kernel == "torch"
    assert "float16" in caplog.text
    with pytest.raises(KernelBuildError, match="float16"):
        PROVIDER.create(TorchNativeOptions(kernel="native"), context)


@pytest.mark.parametrize("options", [{"kernel": "fast"}, {"kernal": "auto"}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValidationError):
        PROVIDER.options(**options)
