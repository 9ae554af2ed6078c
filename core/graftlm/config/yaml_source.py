"""Reading of YAML into layers, with the line of every key and all errors."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from graftlm.config.layers import MAX_DEPTH, KeyPath, Layer, Origin, Problem, dotted
from graftlm.config.variables import VariableError, expand_variables, names_only_a_variable, references
from graftlm.errors import ConfigError
from graftlm.shortening import shortened

__all__ = ["read_override", "read_yaml_file"]

#: Maximum size in bytes of a file, and of the value of an override.
_MAX_BYTES: Final = 1 << 20
#: Maximum number of keys and values after expansion of aliases. Nested aliases could expand to billions.
_MAX_NODES: Final = 40_000
#: Maximum number of characters of all scalars after expansion of aliases and variables.
_MAX_CHARS: Final = 4 << 20
#: Maximum number of characters of a number or a date.
_MAX_NUMBER_CHARS: Final = 1000
_SHOWN_CHARS: Final = 200

_MERGE_TAG = "tag:yaml.org,2002:merge"
_STRING_TAG = "tag:yaml.org,2002:str"
_PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null"))


def read_yaml_file(path: Path, environment: Mapping[str, str]) -> Layer:
    """Read a configuration file.

    Args:
        path: path of the file, shown unchanged in messages.
        environment: the variables for `${VAR}`.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping. Other errors are in the layer's
            `problems`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        # A file that is too large is not decoded, because the limit may split a character.
        text = "" if len(content) > _MAX_BYTES else content.decode("utf-8")
    except FileNotFoundError:
        hint = "" if path.suffix in (".yaml", ".yml") else f"; for a model, write model={str(path)!r}"
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (OSError, ValueError) as error:  # the path may contain a NUL, the file may not be UTF-8
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{shortened(str(path), _SHOWN_CHARS)}: cannot be read: {reason}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: is larger than the maximum size of a configuration, {_MAX_BYTES:,} bytes")

    def origin(line: int) -> Origin:
        return Origin(f"{path}:{line}", f"{path}:{line}", line)

    reader = _Reader(text, origin, environment)
    try:
        values = reader.read(())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_syntax_error(error)}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, got {type(values).__name__}")
    return Layer(values, reader.origins, tuple(reader.problems))


def read_override(text: str) -> Layer:
    """Read one text `a.b=value`. The value is YAML. Variables are not expanded, because the shell does this.

    Raises:
        ConfigError: the path is missing, or the value is not YAML.
    """
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        shown = shortened(repr(text), _SHOWN_CHARS)
        raise ConfigError(f"--set {shown}: must be path=value, such as cache.page_size=16")
    shown = shortened(dotted(keys), _SHOWN_CHARS)
    if len(keys) > MAX_DEPTH:
        raise ConfigError(f"--set: {shown}: has {len(keys):,} parts, expected at most {MAX_DEPTH}")
    if len(value) > _MAX_BYTES:
        raise ConfigError(f"--set: {shown}: has {len(value):,} characters, expected at most {_MAX_BYTES:,}")
    origin = Origin("--set", "--set")
    reader = _Reader(value, lambda line: origin, None)
    try:
        nested = reader.read(keys)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set: {shown}{_syntax_error(error)}") from error
    for end in range(len(keys), 0, -1):
        reader.origins[keys[:end]] = origin
        nested = {keys[end - 1]: nested}
    return Layer(nested, reader.origins, tuple(reader.problems))


def _syntax_error(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        context = f"{error.context}: " if error.context else ""
        kind = "" if isinstance(error, _LimitError) else "not valid YAML: "
        return f":{error.problem_mark.line + 1}: {kind}{shortened(f'{context}{error.problem}', _SHOWN_CHARS)}"
    return f": not valid YAML: {shortened(' '.join(str(error).split()), _SHOWN_CHARS)}"


class _LimitError(yaml.MarkedYAMLError):
    """The error of a document that exceeds a limit."""

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _Loader(yaml.SafeLoader):
    """A YAML loader with limits on the depth and number of nodes. It does not expand aliases."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read one node and its children."""
        self._depth += 1
        self._num_nodes += 1
        _check_limits(self._depth, self._num_nodes, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _check_limits(depth: int, num_nodes: int, mark: Any) -> None:
    """Refuse a document that exceeds the maximum depth or number of nodes."""
    if depth > MAX_DEPTH:
        raise _LimitError(f"lists and mappings are nested more than {MAX_DEPTH} deep", mark)
    if num_nodes > _MAX_NODES:
        raise _LimitError(f"there are more than {_MAX_NODES:,} keys and values", mark)


def _refuse_large(text: str) -> None:
    """Refuse large documents early with libyaml, which needs 1 µs per node. PyYAML's parser needs 25 µs."""
    depth = num_nodes = 0
    for event in _quick_events(text):
        if isinstance(event, yaml.NodeEvent):
            num_nodes += 1
            _check_limits(depth + 1, num_nodes, event.start_mark)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)


def _quick_events(text: str) -> Iterator[yaml.Event]:
    """Yield the events of a document up to its first error. Without libyaml, yield nothing."""
    try:
        from yaml import CSafeLoader
    except ImportError:
        return
    try:
        parser = CSafeLoader(text)
        while (event := parser.get_event()) is not None:
            yield event
    except (yaml.YAMLError, ValueError):  # the loader reports the error
        return


class _UnreadableError(Exception):
    """The error of a value that cannot be read. Its problem has been recorded."""


class _Reader:
    """Converts one YAML document to plain values. A wrong value is dropped and recorded, and reading continues."""

    def __init__(self, text: str, origin: Callable[[int], Origin], environment: Mapping[str, str] | None) -> None:
        self.origins: dict[KeyPath, Origin] = {}
        self.problems: list[Problem] = []
        self._text = text
        self._origin = origin
        self._environment = environment
        self._open: set[int] = set()  # ids of open collections, to detect a collection that contains itself
        self._num_nodes = 0
        self._num_chars = 0

    def read(self, path: KeyPath) -> Any:
        """Return the document's value, None for an empty document. `path` is its key path in the configuration."""
        _refuse_large(self._text)
        self._loader = _Loader(self._text)
        try:
            root = self._loader.get_single_node()
            return None if root is None else self._value(root, path)
        except _UnreadableError:
            return None
        finally:
            self._loader.dispose()

    def _count(self, node: yaml.Node) -> None:
        """Count a key or a value towards the limit. A value that aliases repeat is counted each time."""
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            message = f"with expanded aliases, there are more than {_MAX_NODES:,} keys and values"
            raise _LimitError(message, node.start_mark)

    def _count_chars(self, node: yaml.Node, text: str) -> None:
        """Count the characters of a scalar towards the limit. A scalar that aliases repeat is counted each time."""
        self._num_chars += len(text)
        if self._num_chars > _MAX_CHARS:
            message = f"with expanded aliases and variables, there are more than {_MAX_CHARS:,} characters"
            raise _LimitError(message, node.start_mark)

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count(node)
        if isinstance(node, yaml.MappingNode):
            with self._opened(node, path):
                return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            with self._opened(node, path):
                return self._sequence(node, path)
        assert isinstance(node, yaml.ScalarNode), "YAML has three kinds of nodes"
        return self._scalar(node, path)

    @contextlib.contextmanager
    def _opened(self, node: yaml.Node, path: KeyPath) -> Iterator[None]:
        if id(node) in self._open:
            raise self._unreadable(node, path, "an alias must not refer to a value that contains it")
        if len(self._open) == MAX_DEPTH:
            message = f"with expanded aliases, lists and mappings are nested more than {MAX_DEPTH} deep"
            raise _LimitError(message, node.start_mark)
        self._open.add(id(node))
        try:
            yield
        finally:
            self._open.remove(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, (key_node, value_node) in self._pairs(node, path).items():
            here = (*path, key)
            self.origins[here] = self._origin(key_node.start_mark.line + 1)
            with contextlib.suppress(_UnreadableError):
                values[key] = self._value(value_node, here)
        return values

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return a mapping's pairs by key. Its own pairs have precedence over pairs that `<<` merges."""
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                pairs = {**self._merged(value_node, path), **pairs}
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            self._count(key_node)
            key, line = key_node.value, key_node.start_mark.line + 1
            if key_node.tag != _STRING_TAG:
                self._note(key_node, path, f"keys must be strings, got {_source(key_node)}; put it in quotes")
            elif key in own:
                self._note(key_node, (*path, key), f"duplicate key; it is already in line {own[key]}")
            else:
                own[key] = line
                pairs[key] = (key_node, value_node)
        return pairs

    def _merged(self, node: yaml.Node, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise self._unreadable(source, path, "the value of '<<' must be a mapping or a list of mappings")
            with self._opened(source, path):
                pairs = {**self._pairs(source, path), **pairs}
        return pairs

    def _sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        values: list[Any] = []
        for index, item in enumerate(node.value):
            here = (*path, index)
            self.origins[here] = self._origin(item.start_mark.line + 1)
            with contextlib.suppress(_UnreadableError):
                values.append(self._value(item, here))
        return values

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        self._count_chars(node, node.value)
        if node.tag == _STRING_TAG and self._environment is not None and "$" in node.value:
            return self._expanded(node, path, self._environment)
        return self._construct(node, path)

    def _construct(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag != _STRING_TAG and len(node.value) > _MAX_NUMBER_CHARS:
            num_chars = len(node.value)
            raise self._unreadable(
                node,
                path,
                f"cannot be read as a value: got {num_chars:,} characters, expected at most {_MAX_NUMBER_CHARS:,}",
            )
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
            raise self._unreadable(node, path, f"cannot be read as a value: {reason}") from error

    def _expanded(self, node: yaml.ScalarNode, path: KeyPath, environment: Mapping[str, str]) -> Any:
        line = node.start_mark.line + 1
        try:
            text = expand_variables(node.value, environment)
        except VariableError as error:
            raise self._unreadable(node, path, str(error)) from error
        self._count_chars(node, text)
        if names := references(node.value):
            via = ", ".join(f"${{{name}}}" for name in names)
            origin = self._origin(line)
            self.origins[path] = Origin(f"{origin.source} ({via})", origin.location, line)
        if node.style is not None or not names_only_a_variable(node.value):
            return text
        # A bare ${PORT} may be a number, a boolean or null. In quotes, ${PORT} is a string. The value is always a
        # scalar, so an environment variable cannot add keys.
        tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        if tag not in _PLAIN_TAGS:
            return text
        return self._construct(yaml.ScalarNode(tag, text, node.start_mark, node.end_mark), path)

    def _note(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(path, message, self._origin(node.start_mark.line + 1)))

    def _unreadable(self, node: yaml.Node, path: KeyPath, message: str) -> _UnreadableError:
        self._note(node, path, message)
        return _UnreadableError()


def _source(node: yaml.Node) -> str:
    return shortened(str(node.value), _SHOWN_CHARS) if isinstance(node, yaml.ScalarNode) else "a collection"
