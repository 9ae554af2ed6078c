"""Why a configuration gets the plugin that it gets: what was chosen in a family, and why the others were not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.checkpoint import load_model_config, resolve_checkpoint
from graftlm.config import EngineConfig
from graftlm.contracts import Model, ModelConfig, ModelContext, Provider
from graftlm.registry import AUTO, FAMILIES, Candidate, Family, Registry, selections

__all__ = ["Choice", "explain_choice"]

_Misfit = Callable[[Provider[Any]], str | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a configuration gets of a family.

    Attributes:
        name: of the provider; None when there is none.
        reason: why this one.
        candidates: every name of the family, best first.
        is_auto: whether rank decided; otherwise a name did.
    """

    family: Family
    name: str | None
    reason: str
    candidates: Sequence[Candidate]
    is_auto: bool

    def verdicts(self) -> Iterator[tuple[Candidate, str]]:
        """Yield each candidate with what became of it."""
        for candidate in self.candidates:
            if candidate.name == self.name:
                yield candidate, "chosen" if candidate.obstacle is None else f"chosen, but: {candidate.obstacle}"
            else:
                yield candidate, candidate.obstacle or self._passed_over(candidate)

    def _passed_over(self, candidate: Candidate) -> str:
        chosen = next((one for one in self.candidates if one.name == self.name), None)
        if not self.is_auto or chosen is None or chosen.provider is None or candidate.provider is None:
            return "could be used; name it to have it"
        if candidate.provider.rank < chosen.provider.rank:
            return f"passed over: {chosen.name} has the higher rank"
        return f"passed over: {chosen.name} has the same rank, and comes first by name"


def explain_choice(config: EngineConfig, registry: Registry, key: str) -> Choice:
    """Explain the choice of a family as the engine makes it. No weights are read.

    Args:
        key: of the family.

    Raises:
        GraftlmError: the checkpoint cannot be read, or its model not be made.
    """
    family = FAMILIES[key]
    candidates = registry.candidates(key, fits=_misfit_of(key, config, registry))
    selected = next((one for one in selections(config) if one.family.key == key), None)
    if selected is None:
        return Choice(family, None, _why_none(family), candidates, is_auto=False)
    path = selected.family.name_path or key
    given = config.origins.get(tuple(path.split(".")))
    origin = "the default" if given is None else given.source
    if selected.name != AUTO:
        return Choice(family, selected.name, f"{path} names it ({origin})", candidates, is_auto=False)
    best = next((one.name for one in candidates if one.obstacle is None), None)
    reason = f"{path} is auto ({origin}): the highest rank of those that run here and fit"
    if best is None and key == "tool_calls":  # there, a format that no template names is better than none
        best = next((provider.name for provider in registry.available(key)), None)
        reason = f"{path} is auto ({origin}), and the chat template is nobody's: the highest rank that runs here"
    if best is None:
        reason = f"{path} is auto ({origin}), and none fits"
    return Choice(family, best, reason, candidates, is_auto=True)


def _why_none(family: Family) -> str:
    if family.key == "logits_processor":
        return "requests name the ones that they want"
    if family.key == "storage":
        return "cache.options.storage.name names none"
    return f"{family.name_path} is null"


def _misfit_of(key: str, config: EngineConfig, registry: Registry) -> _Misfit | None:
    """Return what the engine asks of a family's providers beside whether they can run."""
    if key not in ("attention", "model", "reasoning", "tool_calls"):
        return None
    path = resolve_checkpoint(config.model.path)
    if key in ("reasoning", "tool_calls"):
        from graftlm.chat_formats import template_misfit
        from graftlm.tokenization import Tokenizer

        tokenizer = Tokenizer.load(path, trust_remote_code=config.model.trust_remote_code)
        return template_misfit(tokenizer.chat_template)
    model_config = load_model_config(path)
    return _architecture_misfit(model_config) if key == "model" else _attention_misfit(config, registry, model_config)


def _architecture_misfit(model_config: ModelConfig) -> _Misfit:
    def misfit(provider: Provider[Any]) -> str | None:
        if set(model_config.architectures) & set(provider.capabilities.architectures):
            return None
        return f"does not serve {' or '.join(model_config.architectures)}"

    return misfit


def _attention_misfit(config: EngineConfig, registry: Registry, model_config: ModelConfig) -> _Misfit:
    import torch

    from graftlm.assembly import attention_misfit
    from graftlm.checkpoint import torch_dtype

    dtype = torch_dtype(config.model.dtype, model_config)
    provider = registry.model_for(model_config.architectures, config.model.architecture)
    context = ModelContext(model_config, torch.device("meta"), dtype)  # shapes without memory
    model: Model = registry.create("model", provider, {}, context)
    return lambda provider: attention_misfit(provider.capabilities, config, registry.platform, model, dtype)
