"""The built-in models: Llama and its relatives, LFM2, and other architectures with Transformers."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from graftlm import Provider, hookimpl
from graftlm.contracts import Model, ModelCapabilities, ModelContext
from graftlm.errors import UnsupportedArchitectureError

__all__ = ["provide_models"]


@hookimpl
def provide_models() -> Iterable[Provider[Model]]:
    """Return one provider per family."""
    return (
        Provider(
            name="llama",
            summary="Llama 1 to 3, and models of the same architecture",
            api_version=1,
            create=_create_llama,
            capabilities=ModelCapabilities(architectures=("LlamaForCausalLM",), tensor_parallel=True),
        ),
        Provider(
            name="mistral",
            summary="Mistral, Ministral and Mixtral, without images",
            api_version=1,
            create=_create_mistral,
            capabilities=ModelCapabilities(
                architectures=("MistralForCausalLM", "MinistralForCausalLM", "MixtralForCausalLM"),
                tensor_parallel=True,
            ),
        ),
        Provider(
            name="gemma",
            summary="Gemma 2 and the text models of Gemma 3",
            api_version=1,
            create=_create_gemma,
            capabilities=ModelCapabilities(
                architectures=("Gemma2ForCausalLM", "Gemma3ForCausalLM"), tensor_parallel=True
            ),
        ),
        Provider(
            name="qwen",
            summary="Qwen 2, 2.5 and 3, dense or with experts",
            api_version=1,
            create=_create_qwen,
            capabilities=ModelCapabilities(
                architectures=("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
                tensor_parallel=True,
            ),
        ),
        Provider(
            name="phi",
            summary="Phi 3 and 4, without experts and images",
            api_version=1,
            create=_create_phi,
            capabilities=ModelCapabilities(architectures=("Phi3ForCausalLM",), tensor_parallel=True),
        ),
        Provider(
            name="deepseek",
            summary="DeepSeek V2 and V3: latent attention with its compressed cache, experts",
            api_version=1,
            create=_create_deepseek,
            capabilities=ModelCapabilities(
                architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), tensor_parallel=True
            ),
        ),
        Provider(
            name="gpt_oss",
            summary="GPT-OSS: attention sinks, windows in every other layer, experts; decodes MXFP4",
            api_version=1,
            create=_create_gpt_oss,
            capabilities=ModelCapabilities(architectures=("GptOssForCausalLM",), tensor_parallel=True),
        ),
        Provider(
            name="lfm2",
            summary="LFM2: short convolutions, and attention in some layers",
            api_version=1,
            create=_create_lfm2,
            capabilities=ModelCapabilities(architectures=("Lfm2ForCausalLM",)),
        ),
        Provider(
            name="mamba2",
            summary="Mamba 2: state spaces without attention",
            api_version=1,
            create=_create_mamba2,
            capabilities=ModelCapabilities(architectures=("Mamba2ForCausalLM",)),
        ),
        Provider(
            name="granite_hybrid",
            summary="Granite 4 hybrid: state spaces, attention in some layers, experts",
            api_version=1,
            create=_create_granite_hybrid,
            capabilities=ModelCapabilities(architectures=("GraniteMoeHybridForCausalLM",)),
        ),
        Provider(
            name="qwen_next",
            summary="Qwen3-Next and the text models of Qwen 3.5: gated delta networks, attention in some layers",
            api_version=1,
            create=_create_qwen_next,
            capabilities=ModelCapabilities(architectures=("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM")),
        ),
        Provider(
            name="sequence_classification",
            summary="Classifiers, rerankers and reward models: a score head on the last token of one of these families",
            api_version=1,
            create=_create_classifier,
            capabilities=ModelCapabilities(
                architectures=tuple(f"{stem}ForSequenceClassification" for stem in _STEMS), tensor_parallel=True
            ),
        ),
        Provider(
            name="text_embedding",
            summary="Embedding models saved without an output projection, of these families",
            api_version=1,
            create=_create_embedder,
            capabilities=ModelCapabilities(
                architectures=tuple(f"{stem}Model" for stem in _STEMS), tensor_parallel=True
            ),
        ),
        Provider(
            name="transformers",
            summary="Any other decoder-only architecture, with Transformers' own module",
            api_version=1,
            create=_create_transformers,
            capabilities=ModelCapabilities(any_architecture=True),
        ),
    )


def _create_llama(options: Any, context: ModelContext) -> Model:
    from graftlm_models.llama import LlamaForCausalLM

    return LlamaForCausalLM(context)


def _create_qwen(options: Any, context: ModelContext) -> Model:
    from graftlm_models.qwen import QwenForCausalLM

    return QwenForCausalLM(context)


def _create_mistral(options: Any, context: ModelContext) -> Model:
    from graftlm_models.mistral import MistralForCausalLM

    return MistralForCausalLM(context)


def _create_gemma(options: Any, context: ModelContext) -> Model:
    from graftlm_models.gemma import GemmaForCausalLM

    return GemmaForCausalLM(context)


def _create_phi(options: Any, context: ModelContext) -> Model:
    from graftlm_models.phi import PhiForCausalLM

    return PhiForCausalLM(context)


def _create_deepseek(options: Any, context: ModelContext) -> Model:
    from graftlm_models.deepseek import DeepseekForCausalLM

    return DeepseekForCausalLM(context)


def _create_gpt_oss(options: Any, context: ModelContext) -> Model:
    from graftlm_models.gpt_oss import GptOssForCausalLM

    return GptOssForCausalLM(context)


def _create_lfm2(options: Any, context: ModelContext) -> Model:
    from graftlm_models.lfm2 import Lfm2ForCausalLM

    return Lfm2ForCausalLM(context)


def _create_mamba2(options: Any, context: ModelContext) -> Model:
    from graftlm_models.mamba2 import Mamba2ForCausalLM

    return Mamba2ForCausalLM(context)


def _create_granite_hybrid(options: Any, context: ModelContext) -> Model:
    from graftlm_models.granite_hybrid import GraniteMoeHybridForCausalLM

    return GraniteMoeHybridForCausalLM(context)


def _create_qwen_next(options: Any, context: ModelContext) -> Model:
    from graftlm_models.qwen_next import QwenNextForCausalLM

    return QwenNextForCausalLM(context)


def _create_transformers(options: Any, context: ModelContext) -> Model:
    from graftlm_models.transformers_model import TransformersModel

    return TransformersModel(context)


#: Start of the name of a class without output projection, such as "Llama" in "LlamaModel" -> class name of the family's
#: language model, and the function that creates this model.
_STEMS: Mapping[str, tuple[str, Callable[[Any, ModelContext], Model]]] = {
    "Llama": ("LlamaForCausalLM", _create_llama),
    "Mistral": ("MistralForCausalLM", _create_mistral),
    "Ministral": ("MinistralForCausalLM", _create_mistral),
    "Qwen2": ("Qwen2ForCausalLM", _create_qwen),
    "Qwen3": ("Qwen3ForCausalLM", _create_qwen),
    "Qwen2Moe": ("Qwen2MoeForCausalLM", _create_qwen),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", _create_qwen),
    "Mixtral": ("MixtralForCausalLM", _create_mistral),
    "Phi3": ("Phi3ForCausalLM", _create_phi),
    "Gemma2": ("Gemma2ForCausalLM", _create_gemma),
    "Gemma3Text": ("Gemma3ForCausalLM", _create_gemma),
}


def _create_classifier(options: Any, context: ModelContext) -> Model:
    return _create_headless(options, context, "ForSequenceClassification")


def _create_embedder(options: Any, context: ModelContext) -> Model:
    return _create_headless(options, context, "Model")


def _create_headless(options: Any, context: ModelContext, ending: str) -> Model:
    from graftlm_models.headless import create_headless

    names = [name.removesuffix(ending) for name in context.config.architectures]
    stem = next((name for name in names if name in _STEMS), None)
    if stem is None:
        available = ", ".join(f"{name}{ending}" for name in _STEMS)
        raise UnsupportedArchitectureError(
            f"config.json names {', '.join(context.config.architectures)}. Available: {available}"
        )
    architecture, create = _STEMS[stem]
    return create_headless(architecture, partial(create, options), context, has_head=ending != "Model")
