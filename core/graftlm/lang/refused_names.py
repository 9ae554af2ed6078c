"""Names of SGLang that graftlm does not have. Their use raises an error that names the replacement."""

from typing import Any, Final, NoReturn

from graftlm.errors import UnsupportedFeatureError

__all__ = ["REFUSED_NAMES", "RefusedName"]


class RefusedName:
    """An object that can be imported, but not used: every call and every attribute raises UnsupportedFeatureError."""

    def __init__(self, name: str, replacement: str) -> None:
        vars(self).update(_name=name, _replacement=replacement)

    def __repr__(self) -> str:
        return f"<{vars(self)['_name']}: not part of graftlm; {vars(self)['_replacement']}>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedFeatureError."""
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and tools look for special methods of every object
            raise AttributeError(name)
        self._refuse()

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedFeatureError(
            f"{vars(self)['_name']} of SGLang is not part of graftlm; {vars(self)['_replacement']}"
        )


REFUSED_NAMES: Final = {
    name: RefusedName(name, replacement)
    for name, replacement in (
        ("ServerArgs", "use EngineConfig, or the options of `graftlm serve`"),
        ("VertexAI", 'use LiteLLM("vertex_ai/...")'),
        ("global_config", "use set_default_backend(...), and the arguments of gen and run"),
    )
}
