"""docs/checkpoints.md names every supported format."""

from pathlib import Path

import pytest

from graftlm.checkpoint.gguf.architecture import ARCHITECTURES, MISTRAL, MIXTRAL
from graftlm.checkpoint.quantized.compressed_tensors import DECODED
from graftlm.checkpoint.quantized.detection import FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*FORMATS, *DECODED, *ARCHITECTURES])
def test_every_format_and_architecture_is_documented(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("architecture", [*ARCHITECTURES.values(), MISTRAL, MIXTRAL], ids=lambda it: it.class_name)
def test_every_class_is_documented(architecture):
    assert f"`{architecture.class_name}`" in PAGE
