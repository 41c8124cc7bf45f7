"""``hybridep tokenize``: texts -> the file of token ids that a run reads, by a public model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import numpy as np
from numpy.lib import format as npy

from hybridep.commands.common import OUTPUT, emit, note, require_place, verb
from hybridep.commands.progress import ShareProgress
from hybridep.config import replacing
from hybridep.errors import DataError, UserError
from hybridep.hugging_face import read_config
from hybridep.run import Data
from hybridep.units import counted, format_bytes
from runtime.data import TOKEN_FILE, files_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
LINES_FILE = ".jsonl"
"""Ending of files with a JSON object, one document, on each line."""
_END_OF_TEXT = {
    "tokenizer_config.json": "eos_token",
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
}
"""Where a public model's folder says which token ends a text, in order."""
_UINT16_TOKENS = 1 << 16
_BATCH_BYTES = 4_000_000
"""Of text, encoded at a time by all cores: its encodings take up to 80 times as much memory."""
_LARGE_BYTES, _MEMORY_OF_LARGE = 100_000_000, 110
"""A document of so many bytes, and what encoding it takes for each of them, as measured."""

Document = tuple[str, int]
"""A text, and how many bytes of files were read for it."""


@verb(name="tokenize")
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    "model",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    required=True,
    help=f"A public model's folder, or its {TOKENIZER_FILE}.",
)
@click.option("--end-of-text", metavar="TOKEN", help="Follows each document.  [default: what the model's folder says]")
@click.option("--field", default="text", show_default=True, metavar="KEY", help=f"Of the text on a line of {LINES_FILE} files.")
@click.option("-o", "--output", type=OUTPUT, default=Path("tokens.npy"), show_default=True, help="File of token ids.")
def command(texts: tuple[Path, ...], model: Path, end_of_text: str | None, field: str, output: Path, as_json: bool) -> None:
    """Write the tokens of TEXT, files and folders in the order given, for `data.path` of a run.

    A text file is one document; so is each line, a JSON object, of a .jsonl file. Of a folder what ends in .py, .txt, .md or
    .jsonl is read, in the order of paths. An end-of-text token follows each document; empty ones are left out.
    """
    if output.suffix != TOKEN_FILE:
        raise UserError(f"--output {output}: must end in {TOKEN_FILE}, by which runs know token ids")
    require_place("--output", output)
    tokenizer = _load(model)
    ids = tokenizer.get_vocab()
    end_id = _end_of_text(model, ids, end_of_text)
    # Not the number of tokens: there may be gaps.
    vocabulary = max(ids.values()) + 1
    dtype = np.dtype("<u2" if vocabulary <= _UINT16_TOKENS else "<u4")
    files, all_bytes = _files(texts)
    tokens = documents = text_bytes = done_bytes = 0
    with ShareProgress("tokenizing") as progress, replacing(output) as stream:
        _write_header(stream, dtype, tokens)
        for batch in _batches(_documents(files, field)):
            encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
            for (text, read_bytes), encoding in zip(batch, encodings, strict=True):
                done_bytes += read_bytes
                if found := encoding.ids:
                    stream.write(np.array([*found, end_id], dtype).tobytes())
                    tokens, documents, text_bytes = tokens + len(found) + 1, documents + 1, text_bytes + len(text.encode())
            progress(format_bytes(all_bytes), min(1.0, done_bytes / max(1, all_bytes)))
        if not tokens:
            raise DataError(f"TEXT: no text in {counted(len(files), 'file')} ({', '.join(map(str, texts))})")
        stream.seek(0)
        _write_header(stream, dtype, tokens)
    end = tokenizer.id_to_token(end_id)
    if as_json:
        answer = {"path": str(output), "tokens": tokens, "documents": documents, "text_bytes": text_bytes}
        emit(answer | {"dtype": dtype.name, "vocabulary": vocabulary, "end_of_text": end})
        return
    of = f"{counted(documents, 'document')} ({format_bytes(text_bytes)}), {end} after each"
    click.echo(f"{counted(tokens, 'token')} of {of}, written to {output} ({dtype.name})")
    click.echo(f"in the run: data: {{path: {output}}}; model.vocab_size: {vocabulary} or more, as the tokenizer's model has it")


def _load(model: Path) -> Tokenizer:
    """Raises UserError. What the file says of cutting texts off and filling them up is left out."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError(f"needs the package tokenizers ({error}): pip install 'hybridep[tokenizer]'") from None
    path = model / TOKENIZER_FILE if model.is_dir() else model
    if not path.exists() and (model / "tokenizer.model").exists():
        raise UserError(
            f"--tokenizer {model}: has tokenizer.model (SentencePiece) but no {TOKENIZER_FILE}, which is what is read here; "
            "transformers makes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no class of its own
        raise UserError(f"--tokenizer {model}: {path} cannot be read as {TOKENIZER_FILE} ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_of_text(model: Path, ids: dict[str, int], given: str | None) -> int:
    """Raises UserError where nothing says which token it is, or the vocabulary lacks it."""
    where, said = ("--end-of-text", given) if given is not None else _said_of_end(model if model.is_dir() else model.parent)
    number = ids.get(said) if isinstance(said, str) else said
    if number is None or number not in ids.values():
        raise UserError(f"{where} {said!r}: is no token of {model}; give one with --end-of-text")
    return number


def _said_of_end(folder: Path) -> tuple[str, str | int]:
    """Where, and which: a token or its number."""
    for name, key in _END_OF_TEXT.items():
        if (path := folder / name).is_file():
            said = read_config(path).get(key)
            if isinstance(said, dict):
                said = said.get("content")
            # Chat models may have several.
            if isinstance(said, list):
                said = next(iter(said), None)
            if isinstance(said, str | int):
                return f"{path}: {key}", said
    keys = ", ".join(f"{key} in {name}" for name, key in _END_OF_TEXT.items())
    raise UserError(f"--end-of-text: give the token that follows each document; {folder} does not say ({keys})")


def _files(texts: Sequence[Path]) -> tuple[list[Path], int]:
    """All that is to be read, and its bytes. Raises DataError."""
    suffixes = (*Data().suffixes, LINES_FILE)
    files, size_bytes = list[Path](), 0
    for path in texts:
        try:
            found = files_of(path, suffixes)
            size_bytes += sum(file.stat().st_size for file in found)
        except OSError as error:
            raise DataError(f"TEXT: {error.filename or path} cannot be read ({error.strerror})") from None
        if not found:
            raise DataError(f"TEXT: {path} holds no file that ends in {', '.join(suffixes)}; name others one by one")
        files += found
    return files, size_bytes


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Each ends with the document that makes it ``_BATCH_BYTES`` or more."""
    batch, size_bytes = list[Document](), 0
    for document in documents:
        batch.append(document)
        size_bytes += document[1]
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    yield batch


def _documents(files: Iterable[Path], field: str) -> Iterator[Document]:
    """Raises DataError, which names the file and the line or the byte."""
    for path in files:
        try:
            if path.suffix == LINES_FILE:
                yield from _lines(path, field)
                continue
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"TEXT: {path} cannot be read ({error.strerror})") from None
        if b"\0" in raw:
            raise DataError(f"{path}: is no text in UTF-8, byte {raw.index(0)} is null")
        if len(raw) >= _LARGE_BYTES:
            takes = f"whose encoding takes about {format_bytes(_MEMORY_OF_LARGE * len(raw))} of memory"
            note(f"hybridep tokenize: {path} is one document, {takes}; lines of {LINES_FILE} files are documents of their own")
        yield _decoded(path, raw, 0), len(raw)


def _lines(path: Path, field: str) -> Iterator[Document]:
    offset = 0
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            where, line = f"{path}:{number}", _decoded(path, raw, offset)
            offset += len(raw)
            if not line.strip():
                continue
            try:
                data = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: is not JSON ({error})") from None
            if not isinstance(data, dict) or field not in data:
                found = f"keys {', '.join(data)}" if isinstance(data, dict) else f"a {type(data).__name__}"
                raise DataError(f"{where}: must be an object with the key {field!r}, found {found}; --field names another key")
            text = data[field]
            if not isinstance(text, str):
                raise DataError(f"{where}: {field}: must be a text, found {type(text).__name__}; --field names another key")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{where}: {field}: character {error.start} is half of a surrogate pair") from None
            yield text, len(raw)


def _decoded(path: Path, raw: bytes, offset: int) -> str:
    """What is at ``offset`` of a file, without the mark that some programs begin texts with."""
    try:
        return raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 at byte {offset + error.start} ({error.reason}); iconv converts texts") from None


def _write_header(stream: IO[bytes], dtype: np.dtype[Any], tokens: int) -> None:
    """As ``numpy.save`` writes it: as long for any number."""
    npy.write_array_header_1_0(stream, {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)})
