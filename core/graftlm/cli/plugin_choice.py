"""Explains why a plugin is chosen, and why the other plugins of its family are not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graftlm.checkpoint import load_model_config, resolve_checkpoint
from graftlm.config import EngineConfig
from graftlm.contracts import AttentionLayer, Model, ModelConfig, ModelContext, Provider
from graftlm.errors import GraftlmError, ModelError
from graftlm.registry import AUTO, FAMILIES, Candidate, Family, Registry, selections

__all__ = ["Choice", "explain_choice"]

#: Returns the reason why a provider cannot be used; None if it can be used.
_Misfit = Callable[[Provider[Any]], str | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a provider for a family.

    Attributes:
        family: the family.
        name: name of the chosen provider; None if no provider was chosen.
        reason: the reason for the choice.
        candidates: all providers of the family, the best first.
        is_auto: whether the ranks determine the choice. If not, the configuration names the provider.
    """

    family: Family
    name: str | None
    reason: str
    candidates: Sequence[Candidate]
    is_auto: bool

    def verdicts(self) -> Iterator[tuple[Candidate, str]]:
        """Yield each candidate with a verdict: "chosen", or the reason why it was not chosen."""
        for candidate in self.candidates:
            if candidate.name == self.name:
                yield (
                    candidate,
                    "chosen" if candidate.obstacle is None else f"chosen, but not usable: {candidate.obstacle}",
                )
            else:
                yield candidate, candidate.obstacle or self._passed_over(candidate)

    def _passed_over(self, candidate: Candidate) -> str:
        chosen = next((one for one in self.candidates if one.name == self.name), None)
        if not self.is_auto or chosen is None or chosen.provider is None or candidate.provider is None:
            return "available, but not named in the configuration"
        if candidate.provider.rank < chosen.provider.rank:
            return f"not chosen: {chosen.name} has a higher rank"
        return f"not chosen: {chosen.name} has the same rank, and its name comes first in the alphabet"


def explain_choice(config: EngineConfig, registry: Registry, key: str) -> Choice:
    """Return the engine's choice for a family, with its reasons. No weights are read.

    Args:
        key: key of the family.

    Raises:
        GraftlmError: the checkpoint cannot be read, or its model cannot be created.
    """
    requirements = _requirements(key, config, registry)
    choice = _choice(config, registry, FAMILIES[key], registry.candidates(key, fits=requirements.misfit))
    return replace(
        choice,
        reason=choice.reason + requirements.caveat,
        candidates=[_with_refusal(one, requirements) if one.name == choice.name else one for one in choice.candidates],
    )


def _choice(config: EngineConfig, registry: Registry, family: Family, candidates: Sequence[Candidate]) -> Choice:
    key = family.key
    selected = next((one for one in selections(config) if one.family.key == key), None)
    if selected is None:
        return Choice(family, None, _reason_for_none(family), candidates, is_auto=False)
    path = selected.family.name_path or key
    given = config.origins.get(tuple(path.split(".")))
    origin = "the default" if given is None else given.source
    if selected.name != AUTO:
        return Choice(family, selected.name, f"{path} names it ({origin})", candidates, is_auto=False)
    best = next((one.name for one in candidates if one.obstacle is None), None)
    reason = f"{path} is auto ({origin}): this plugin has the highest rank of those that fit and run on this machine"
    if best is None and key == "tool_calls":  # a format that the template does not use is better than no format
        best = next((provider.name for provider in registry.available(key)), None)
        reason = (
            f"{path} is auto ({origin}), and no format fits the chat template: this format has the highest rank of "
            "those that run on this machine"
        )
    if best is None:
        reason = f"{path} is auto ({origin}), and no plugin fits"
    return Choice(family, best, reason, candidates, is_auto=True)


def _reason_for_none(family: Family) -> str:
    if family.key == "logits_processor":
        return "each request names the logits processors that it uses"
    if family.key == "storage":
        return "cache.options.storage.name is not set"
    return f"{family.name_path} is null"


@dataclass(frozen=True, slots=True)
class _Requirements:
    """The engine's requirements for the providers of a family, besides the ability to run on this machine.

    Attributes:
        misfit: called for each provider; None if there is no such requirement.
        refusal: called only for the chosen provider; None if there is no such requirement.
        caveat: text about requirements that could not be checked. It is appended to a reason.
    """

    misfit: _Misfit | None = None
    refusal: _Misfit | None = None
    caveat: str = ""


def _with_refusal(candidate: Candidate, requirements: _Requirements) -> Candidate:
    if requirements.refusal is None or candidate.provider is None or candidate.obstacle is not None:
        return candidate
    return replace(candidate, obstacle=requirements.refusal(candidate.provider))


def _requirements(key: str, config: EngineConfig, registry: Registry) -> _Requirements:
    if key not in ("attention", "model", "reasoning", "tool_calls"):
        return _Requirements()
    path = resolve_checkpoint(config.model.path)
    if key in ("reasoning", "tool_calls"):
        from graftlm.chat.chat_formats import template_misfit
        from graftlm.chat.configured_tokenizer import load_tokenizer

        return _Requirements(template_misfit(load_tokenizer(config, path).chat_template))
    model_config = load_model_config(path)
    if key == "model":
        return _model_requirements(config, registry, model_config, path)
    return _attention_requirements(config, registry, model_config, path)


def _model_requirements(
    config: EngineConfig, registry: Registry, model_config: ModelConfig, path: Path
) -> _Requirements:
    def does_not_serve(provider: Provider[Any]) -> str:
        return f"does not support {' or '.join(model_config.architectures)}"

    def refusal(provider: Provider[Any]) -> str | None:
        try:
            _meta_model(config, registry, model_config, path, provider)
        except GraftlmError as error:
            return str(error)
        return None

    misfit = registry.model_misfit(model_config.architectures)
    if config.model.architecture != AUTO:  # the named provider is tried even if it does not declare the architecture
        return _Requirements(_exempt(config.model.architecture, misfit or does_not_serve), refusal)
    return _Requirements(misfit or does_not_serve, refusal)


def _exempt(name: str, misfit: _Misfit) -> _Misfit:
    """Return `misfit` for all providers except the provider `name`, which always fits."""
    return lambda provider: None if provider.name == name else misfit(provider)


def _attention_requirements(
    config: EngineConfig, registry: Registry, model_config: ModelConfig, path: Path
) -> _Requirements:
    from graftlm.assembly.plugin_choices import attention_misfit
    from graftlm.checkpoint import torch_dtype

    dtype = torch_dtype(config.model.dtype, model_config)
    provider = registry.model_for(model_config.architectures, config.model.architecture)
    model = _meta_model(config, registry, model_config, path, provider)
    layers: Sequence[AttentionLayer] = ()
    caveat = ""
    try:
        layers = model.attention_layers
    except ModelError:  # the layers are known only after a run with real weights
        caveat = "; the requirements of the model's layers are known only after the trial run when the engine starts"
    return _Requirements(
        lambda provider: attention_misfit(provider.capabilities, config, registry.platform, layers, dtype),
        caveat=caveat,
    )


def _meta_model(
    config: EngineConfig, registry: Registry, model_config: ModelConfig, path: Path, provider: Provider[Model]
) -> Model:
    """Create the model on the device "meta", which uses no memory."""
    import torch

    from graftlm.assembly.plugin_choices import create_model
    from graftlm.checkpoint import torch_dtype

    dtype = torch_dtype(config.model.dtype, model_config)
    code_folder = path if config.model.trust_remote_code else None
    context = ModelContext(model_config, torch.device("meta"), dtype, config.model.context_len, code_folder)
    return create_model(config, registry, provider, context)
