"""Why a configuration gets the plugin that it gets: what was chosen in a family, and why the others were not."""

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
    asked = _asked_of(key, config, registry)
    choice = _choice(config, registry, FAMILIES[key], registry.candidates(key, fits=asked.misfit))
    return replace(
        choice,
        reason=choice.reason + asked.caveat,
        candidates=[_with_refusal(one, asked) if one.name == choice.name else one for one in choice.candidates],
    )


def _choice(config: EngineConfig, registry: Registry, family: Family, candidates: Sequence[Candidate]) -> Choice:
    key = family.key
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the engine asks of a family's providers beside whether they can run.

    Attributes:
        misfit: asked of each; None: nothing is.
        refusal: asked of the chosen one, at last; None: nothing is.
        caveat: what could not be asked; goes behind a reason.
    """

    misfit: _Misfit | None = None
    refusal: _Misfit | None = None
    caveat: str = ""


def _with_refusal(candidate: Candidate, asked: _Asked) -> Candidate:
    if asked.refusal is None or candidate.provider is None or candidate.obstacle is not None:
        return candidate
    return replace(candidate, obstacle=asked.refusal(candidate.provider))


def _asked_of(key: str, config: EngineConfig, registry: Registry) -> _Asked:
    if key not in ("attention", "model", "reasoning", "tool_calls"):
        return _Asked()
    path = resolve_checkpoint(config.model.path)
    if key in ("reasoning", "tool_calls"):
        from graftlm.chat.chat_formats import template_misfit
        from graftlm.tokenization import Tokenizer

        tokenizer = Tokenizer.load(path, trust_remote_code=config.model.trust_remote_code)
        return _Asked(template_misfit(tokenizer.chat_template))
    model_config = load_model_config(path)
    if key == "model":
        return _asked_of_models(config, registry, model_config, path)
    return _asked_of_attention(config, registry, model_config, path)


def _asked_of_models(config: EngineConfig, registry: Registry, model_config: ModelConfig, path: Path) -> _Asked:
    def serves_nothing(provider: Provider[Any]) -> str:
        return f"does not serve {' or '.join(model_config.architectures)}"

    def refusal(provider: Provider[Any]) -> str | None:
        try:
            _twin(config, registry, model_config, path, provider)
        except GraftlmError as error:
            return str(error)
        return None

    misfit = registry.model_misfit(model_config.architectures)
    if config.model.architecture != AUTO:  # what is named is asked in earnest, whatever it claims
        return _Asked(_of_others(config.model.architecture, misfit or serves_nothing), refusal)
    return _Asked(misfit or serves_nothing, refusal)


def _of_others(name: str, misfit: _Misfit) -> _Misfit:
    return lambda provider: None if provider.name == name else misfit(provider)


def _asked_of_attention(config: EngineConfig, registry: Registry, model_config: ModelConfig, path: Path) -> _Asked:
    from graftlm.assembly.plugin_choices import attention_misfit
    from graftlm.checkpoint import torch_dtype

    dtype = torch_dtype(config.model.dtype, model_config)
    provider = registry.model_for(model_config.architectures, config.model.architecture)
    model = _twin(config, registry, model_config, path, provider)
    layers: Sequence[AttentionLayer] = ()
    caveat = ""
    try:
        layers = model.attention_layers
    except ModelError:  # it can only be tried with numbers
        caveat = "; what the model's layers need is found out by a trial run when the engine starts"
    return _Asked(
        lambda provider: attention_misfit(provider.capabilities, config, registry.platform, layers, dtype),
        caveat=caveat,
    )


def _twin(
    config: EngineConfig, registry: Registry, model_config: ModelConfig, path: Path, provider: Provider[Model]
) -> Model:
    """Create the model as the engine does, but without memory."""
    import torch

    from graftlm.assembly.plugin_choices import create_model
    from graftlm.checkpoint import torch_dtype

    dtype = torch_dtype(config.model.dtype, model_config)
    code_folder = path if config.model.trust_remote_code else None
    context = ModelContext(model_config, torch.device("meta"), dtype, config.model.context_len, code_folder)
    return create_model(config, registry, provider, context)
