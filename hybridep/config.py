"""Strict configuration: YAML -> frozen pydantic models, with file, line and key in every error and ``--set`` overrides."""

from __future__ import annotations

import csv
import difflib
import errno
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import SEEK_SET, BufferedWriter, FileIO
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Annotated, Any, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, PlainValidator, ValidationError
from pydantic_core import PydanticSerializationError

from hybridep.errors import ConfigError, UserError
from hybridep.units import Dimension, exact, parse


class Strict(BaseModel):
    """Base of everything a user can write: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __eq__(self, other: object) -> bool:
        """By fields alone: pydantic's own compares cached arrays, too, which have no truth value."""
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other fields, not validated, as pydantic makes it, but without what was computed from the former fields
        (``cached_property``)."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """As pydantic makes it, but that an interrupt stays one: pydantic tells of whatever a serializer raises as an error."""
        try:
            return super().model_dump(**options)
        except PydanticSerializationError as error:
            if error.__cause__ is None or isinstance(error.__cause__, Exception):
                raise
            raise error.__cause__ from None


_LEAST, _MOST = 1e-18, 1e30
"""Of any base unit that is divided by; what comes out is still finite."""


def _quantity(dimension: Dimension, *, positive: bool) -> tuple[BeforeValidator, PlainSerializer]:
    def read(value: object) -> float:
        try:
            number = parse(value, dimension)
        except UserError as error:
            raise ValueError(str(error)) from None
        if number < 0 or (positive and number == 0):
            raise ValueError(f"{value!r} must be {'above' if positive else 'at least'} zero")
        if positive and not _LEAST <= number <= _MOST:
            raise ValueError(f"{value!r} is too {'large' if number > 1 else 'small'} to compute with")
        return number

    return BeforeValidator(read), PlainSerializer(lambda value: exact(value, dimension), return_type=str)


Bandwidth = Annotated[float, *_quantity(Dimension.BANDWIDTH, positive=True)]
"""Bytes per second; written ``10 Gbps``."""
Duration = Annotated[float, *_quantity(Dimension.TIME, positive=False)]
"""Seconds; written ``0.2 ms``."""
Size = Annotated[float, *_quantity(Dimension.SIZE, positive=True)]
"""Bytes; written ``64 GiB``."""
Throughput = Annotated[float, *_quantity(Dimension.THROUGHPUT, positive=True)]
"""FLOPs per second; written ``150 TFLOPS``."""

Price = Annotated[float, *_quantity(Dimension.PRICE, positive=False)]
"""Dollars; written ``0.50 $``."""
TransferPrice = Annotated[float, *_quantity(Dimension.TRANSFER_PRICE, positive=False)]
"""Dollars per byte; written ``0.02 $/GB``."""
Rent = Annotated[float, *_quantity(Dimension.RENT, positive=False)]
"""Dollars per second; written ``2.50 $/h``."""

ModelT = TypeVar("ModelT", bound=Strict)

_Loader: type[yaml.SafeLoader | yaml.CSafeLoader] = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""The compiled one reads plans between a hundred sites in one second, not ten."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError when it cannot be read, is not YAML or not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "", f"cannot be read ({error})") from None
    try:
        root = yaml.compose(text, Loader=_Loader)
        _check_nodes(path, root)
        data = _Loader("").construct_document(root) if root is not None else None
    except RecursionError:
        raise ConfigError(str(path), "", "is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(str(path), "", f"is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(str(path), "", f"must hold keys and values, found {type(data).__name__}")
    return data


def _check_nodes(path: Path, root: yaml.Node | None) -> None:
    """Raises ConfigError for what YAML lets pass: a key that is given twice, and a value inside itself."""
    under_way, done = set[int](), set[int]()

    def walk(node: yaml.Node, name: str) -> None:
        where = f"{path}:{node.start_mark.line + 1}"
        if id(node) in under_way:
            raise ConfigError(where, name, "an alias inside of what it stands for")
        if id(node) in done or isinstance(node, yaml.ScalarNode):
            return
        under_way.add(id(node))
        prefix, seen = f"{name}." if name else "", set[tuple[str, str]]()
        for index, entry in enumerate(node.value):
            if isinstance(node, yaml.SequenceNode):
                walk(entry, f"{prefix}{index}")
                continue
            key, value = entry
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise ConfigError(f"{path}:{key.start_mark.line + 1}", f"{prefix}{key.value}", "is given twice")
                seen.add((key.tag, key.value))
            walk(value, f"{prefix}{key.value}")
        under_way.remove(id(node))
        done.add(id(node))

    if root is not None:
        walk(root, "")


def read_csv(path: Path, columns: Iterable[str]) -> list[tuple[int, dict[str, str]]]:
    """Rows of a CSV file that has these columns, each with its line (from 1); empty for values that a short row lacks. Raises
    ConfigError when it cannot be read, lacks a column or all rows, or a row has more values than the header, as a decimal comma
    makes."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        reader = csv.DictReader(lines, restval="", skipinitialspace=True)
        rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(str(path), "", f"cannot be read ({error})") from None
    if not rows or not set(columns) <= set(reader.fieldnames or ()):
        found = f"found {lines[0].strip()[:80]!r}" if lines else "it is empty"
        raise ConfigError(f"{path}:1", "header", f"needs the columns {','.join(columns)} and at least one row ({found})")
    for line, row in rows:
        if any(row.pop(None, ())):
            raise ConfigError(f"{path}:{line}", "", f"has more values than there are columns ({lines[line - 1].strip()[:80]!r})")
    return rows


def write_yaml(path: Path, data: Mapping[str, Any]) -> None:
    """Write a mapping as YAML through a temporary file, so that no half-written file is ever seen under ``path``."""
    text = yaml.safe_dump(dict(data), sort_keys=False, width=140, default_flow_style=None)
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Raises UserError when it cannot be written."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises UserError when it cannot be written."""
    with replacing(path) as stream:
        stream.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A stream that becomes the file when the context ends, also where the power fails, and leaves nothing when it ends in an
    error. Where the path is a link, the file that it leads to; a device or a pipe is written to as it is. Raises UserError when
    it cannot be written; what else goes wrong meanwhile is raised as it is."""
    with _writing(path):
        if path.exists() and not path.is_file():
            temporary, target, handle = None, path, os.open(path, os.O_WRONLY)
        else:
            target = Path(os.path.realpath(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with _Output(path, handle) as stream:
            yield stream
            if temporary is not None:
                with _writing(path):
                    sync(stream)
        if temporary is not None:
            # mkstemp makes files that only the owner reads; results are meant to be shared like any other file.
            umask = os.umask(0)
            os.umask(umask)
            with _writing(path):
                os.chmod(temporary, 0o666 & ~umask)
                os.replace(temporary, target)
    except BaseException:
        if temporary is not None:
            os.unlink(temporary)
        raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """An OSError becomes a UserError that says what could not be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None


class _Output(BufferedWriter):
    """Errors of its own are told from those of whoever writes to it."""

    def __init__(self, path: Path, handle: int) -> None:
        super().__init__(FileIO(handle, "wb"))
        self._path = path

    def write(self, content: Any, /) -> int:
        with _writing(self._path):
            return super().write(content)

    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        with _writing(self._path):
            return super().seek(offset, whence)

    def flush(self) -> None:
        with _writing(self._path):
            super().flush()


def sync(stream: IO[bytes]) -> None:
    """Return when what was written would outlive a power cut. Raises OSError."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """The same for the names in a folder, where its file system can do that. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def require_writable(key: str, folder: Path) -> None:
    """Make a folder and try a file in it. Raises UserError that begins with ``key``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hybridep."):
            pass
    except OSError as error:
        raise UserError(f"{key}: {folder} cannot be written ({error.strerror})") from None


def build(model: type[ModelT], data: Mapping[str, Any], where: str, lines: Mapping[str, int | str] | None = None) -> ModelT:
    """Validate ``data``; raises ConfigError that names the first wrong key, its value and the nearest valid key. ``lines``: what
    dotted keys are from, a line of the file ``where`` or the override that replaced it."""
    # Pydantic takes true for 1.
    for location in _booleans(dict(data)):
        if not _takes_boolean(model, location):
            key = ".".join(str(part) for part in location)
            problem = "cannot be true or false (YAML's yes, no, on and off are, too)"
            raise ConfigError(_place_of(key, where, lines or {}), key, problem)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _config_error(model, error, where, lines or {}) from None


def load(model: type[ModelT], path: Path, overrides: Iterable[str] = ()) -> ModelT:
    """Read a YAML file into ``model``. ``overrides`` are ``a.b=value`` texts, as after ``--set``."""
    data = read_yaml(path)
    return build(model, data, str(path), apply_overrides(data, path, overrides))


def apply_overrides(data: dict[str, Any], path: Path, overrides: Iterable[str]) -> dict[str, int | str]:
    """Change what was read from a YAML file; returns what its keys are from, for ``build``."""
    lines: dict[str, int | str] = dict(key_lines(path))
    for override in overrides:
        key = apply_override(data, override)
        lines = {name: line for name, line in lines.items() if not name.startswith(f"{key}.")} | {key: f"--set {override}"}
    return lines


def apply_override(data: dict[str, Any], override: str) -> str:
    """Set ``a.b=c`` in nested mappings (and ``a.0.b`` in lists); the value is read as YAML. Returns the key as errors name it:
    with entries of lists by number."""
    key, found, text = override.partition("=")
    if not found or not key:
        raise UserError(f"--set {override}: write it as key.path=value")
    *parents, last = key.split(".")
    node: Any = data
    path: list[str] = []
    for parent in parents:
        path.append(_place(node, parent, override))
        node = node[int(path[-1])] if isinstance(node, list) else node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            raise UserError(f"--set {override}: {parent!r} holds a single value, not further keys")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"--set {override}: {text!r} is not YAML; close quotes and brackets") from None
    path.append(_place(node, last, override))
    node[int(path[-1]) if isinstance(node, list) else last] = value
    return ".".join(path)


def _place(node: dict[str, Any] | list[Any], text: str, override: str) -> str:
    """Key in a mapping; position in a list, by number or by the ``name`` of its entries (``levels.dc.bandwidth``)."""
    if isinstance(node, dict):
        return text
    for index, entry in enumerate(node):
        if isinstance(entry, dict) and entry.get("name") == text:
            return str(index)
    if text.isdecimal() and int(text) < len(node):
        return str(int(text))
    names = [str(entry["name"]) for entry in node if isinstance(entry, dict) and "name" in entry]
    raise UserError(f"--set {override}: no entry {text!r} here; there are {', '.join(names) or len(node)}")


def key_lines(path: Path) -> dict[str, int]:
    """Dotted key -> line number (from 1) of a YAML file that parses."""
    lines: dict[str, int] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name = f"{prefix}{key.value}"
                lines[name] = key.start_mark.line + 1
                walk(value, f"{name}.")
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[f"{prefix}{index}"] = value.start_mark.line + 1
                walk(value, f"{prefix}{index}.")

    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    if root is not None:
        walk(root, "")
    return lines


def _config_error(model: type[Strict], error: ValidationError, where: str, lines: Mapping[str, int | str]) -> ConfigError:
    # A misspelt key also shows as a missing one: the misspelling is what the user can mend.
    first = min(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        valid = _fields_at(model, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
        problem = f"unknown key; {hint}"
    elif first["type"] == "missing":
        problem = "is missing"
    elif first["type"] != "value_error" and "input" in first:
        problem = f"{problem} (found {first['input']!r})"
    return ConfigError(_place_of(key, where, lines), key, problem)


def _place_of(key: str, where: str, lines: Mapping[str, int | str]) -> str:
    """The line or the override that a dotted key is from, or the nearest one around it."""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    place = lines.get(key)
    return place if isinstance(place, str) else f"{where}:{place}" if place is not None else where


def _booleans(data: Any) -> list[tuple[int | str, ...]]:
    """Where there are any in nested mappings and lists."""
    found: list[tuple[int | str, ...]] = []
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, bool):
            found.append((key,))
        elif isinstance(value, dict | list | tuple):
            found += [(key, *rest) for rest in _booleans(value)]
    return found


def _takes_boolean(annotation: Any, location: tuple[int | str, ...]) -> bool:
    """Whether there may be a boolean, or some other error is to be told: a key that is unknown, or too much nested."""
    if annotation in (Any, bool):
        return True
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(location[0])) if location else None
        if field is None or any(isinstance(one, PlainValidator) for one in field.metadata):
            return True  # what has a reader of its own says itself what it takes
        return _takes_boolean(field.annotation, location[1:])
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _takes_boolean(inner[0], location)
    if get_origin(annotation) in (Union, UnionType):
        return any(_takes_boolean(one, location) for one in inner if one is not NoneType)
    return bool(location) and (not inner or any(_takes_boolean(one, location[1:]) for one in inner if one is not ...))


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the nested model at ``location``."""
    current: type[BaseModel] = model
    for part in location:
        if isinstance(part, int) or part not in current.model_fields:
            continue
        nested = _nested_model(current.model_fields[part].annotation)
        if nested is None:
            return []
        current = nested
    return list(current.model_fields)


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        nested = _nested_model(argument)
        if nested is not None:
            return nested
    return None
