"""Texts as a public model's tokenizer makes them token ids, and what a run reads of them."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_cases import Call, Inputs
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from hybridep.commands import tokenize
from hybridep.commands.inputs import load_run, load_workload
from runtime.data import training_batches

END = "</s>"
TEXTS = ["The quick brown fox jumps over the lazy dog.\n", "  Straße, naïve 漢字 🦊\r\n\tdef f(x):\n", "fox </s> dog dog"]


def bytes_tokenizer() -> Tokenizer:
    """BPE over bytes, as of Qwen, that cuts off, fills up and adds a token at the start unless told not to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    return tokenizer


def pieces_tokenizer() -> Tokenizer:
    """BPE over whole texts with bytes for what is unknown, as of Mixtral."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(TEXTS[:1], trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False))
    made = json.loads(tokenizer.to_str()) | {"pre_tokenizer": None}
    made["added_tokens"] = made["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A public model's folder."""
    return written(bytes_tokenizer(), tmp_path)


def written(tokenizer: Tokenizer, folder: Path) -> Path:
    (model := folder / "model").mkdir(exist_ok=True)
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    return model


def expected(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = [tokenizer.token_to_id(END)]
    return [number for text in texts for number in tokenizer.encode(text, add_special_tokens=False).ids + end]


def corpus_in(folder: Path, texts: list[str]) -> Path:
    """Half of the texts in files of their own, half on lines, in the order of paths; and empty ones."""
    (corpus := folder / "corpus").mkdir()
    half = len(texts) // 2
    for number, text in enumerate(texts[:half]):
        (corpus / f"{number:04d}.md").write_bytes(text.encode())
    (corpus / "9.txt").touch()
    lines = [json.dumps({"text": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(["", *texts[half:]])]
    (corpus / "sub").mkdir()
    (corpus / "sub" / "lines.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    (corpus / "other.csv").write_bytes(b"\xff")
    return corpus


@pytest.mark.parametrize("make", [bytes_tokenizer, pieces_tokenizer])
def test_ids_are_the_tokenizers_own_with_end_of_text_after_each(
    make: Callable[[], Tokenizer], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "_BATCH_BYTES", 200)
    rng, words = np.random.default_rng(0), [*" ".join(TEXTS).split(" "), " ", "\n"]
    texts = TEXTS + ["x" + "".join(rng.choice(words, size=rng.integers(1, 60))) for _ in range(40)]
    model, corpus, output = written(make(), tmp_path), corpus_in(tmp_path, texts), tmp_path / "new" / "tokens.npy"
    result = call("tokenize", corpus, "--tokenizer", model, "-o", output, "--json")
    assert result.code == 0 and not result.err, result.err
    ids = expected(make(), texts)
    found = np.load(output)
    assert found.tolist() == ids and found.dtype == np.uint16
    assert result.json == {
        "path": str(output),
        "tokens": len(ids),
        "documents": len(texts),
        "text_bytes": sum(len(text.encode()) for text in texts),
        "dtype": "uint16",
        "vocabulary": make().get_vocab_size(),
        "end_of_text": END,
    }
    # To the byte what numpy writes, in any batches, over what was there.
    np.save(saved := tmp_path / "saved.npy", np.array(ids, dtype=np.uint16))
    assert output.read_bytes() == saved.read_bytes()
    monkeypatch.setattr(tokenize, "_BATCH_BYTES", 4_000_000)
    shown = call("tokenize", corpus, "--tokenizer", model / "tokenizer.json", "-o", output)
    assert output.read_bytes() == saved.read_bytes() and [path.name for path in output.parent.iterdir()] == ["tokens.npy"]
    assert f"{len(ids)} tokens of 43 documents" in shown.out and f"data: {{path: {output}}}" in shown.out
    assert f"model.vocab_size: {make().get_vocab_size()} or more" in shown.out


def test_a_large_vocabulary_takes_four_bytes(model: Path, tmp_path: Path, call: Call) -> None:
    """65,536 tokens take two. Numbers of tokens may leave gaps, so it is the largest one that counts."""
    text, output = tmp_path / "text", tmp_path / "tokens.npy"
    text.write_text("far")
    for last, dtype in ((65_535, "uint16"), (65_536, "uint32")):
        saved = Tokenizer(models.WordLevel({END: 0, "far": 1}, unk_token=END)).to_str().replace('"far":1', f'"far":{last}')
        (model / "tokenizer.json").write_text(saved)
        result = call("tokenize", text, "--tokenizer", model, "-o", output, "--json")
        assert (result.json["dtype"], result.json["vocabulary"]) == (dtype, last + 1)
        assert (found := np.load(output)).tolist() == [last, 0] and found.dtype == dtype


def test_the_folder_says_what_ends_a_text(model: Path, tmp_path: Path, call: Call) -> None:
    text, output = tmp_path / "text", tmp_path / "tokens.npy"
    text.write_bytes(b"\xef\xbb\xbffox")

    def last(*more: object) -> str:
        result = call("tokenize", text, "--tokenizer", model, "-o", output, "--json", *more)
        number = np.load(output)[-1] if not result.code else -1
        assert result.code or result.json["end_of_text"] == bytes_tokenizer().id_to_token(number)
        return str(result.json["end_of_text"] if not result.code else result.json["error"])

    (model / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    (model / "config.json").write_text('{"eos_token_id": 0}')
    assert last() == END and last("--end-of-text", "<s>") == "<s>"
    # The mark at the start is no text.
    assert np.load(output)[:-1].tolist() == bytes_tokenizer().encode("fox", add_special_tokens=False).ids
    (model / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert last() == "<s>"
    (model / "config.json").write_text("{}")
    assert last() == END
    for wrong in (-1, 300):
        (model / "config.json").write_text(json.dumps({"eos_token_id": wrong}))
        assert f"config.json: eos_token_id {wrong}: is no token of {model}; give one with --end-of-text" in last()
    for file in ("config.json", "generation_config.json"):
        (model / file).unlink()
    assert f"--end-of-text: give the token that follows each document; {model} does not say" in last()
    assert "--end-of-text '<end>': is no token of" in last("--end-of-text", "<end>")


def test_a_run_reads_it(model: Path, inputs: Inputs, call: Call) -> None:
    output = inputs.folder / "tokens.npy"
    result = call("tokenize", inputs.text, "--tokenizer", model, "-o", output, "--json")
    run, size = load_run(str(inputs.run), [f"data.path={output}"]), f"model.vocab_size={result.json['vocabulary']}"
    tokens, targets = training_batches(run, load_workload(str(inputs.workload), [size]))(1, 0, 4)
    ids = " ".join(map(str, expected(bytes_tokenizer(), [inputs.text.read_text()])))
    assert all(" ".join(map(str, [*row, int(end)])) in ids for row, end in zip(tokens.tolist(), targets[:, -1], strict=True))
    refused = call("train", inputs.run, "--set", f"data.path={output}")
    assert refused.code == 2 and "is not below model.vocab_size 256" in refused.err


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("z.txt", b"good \xe9t\xe9", "z.txt: is not UTF-8 at byte 5 (invalid continuation byte)"),
        ("z.txt", b"g\0o\0", "z.txt: is no text in UTF-8, byte 1 is null"),
        ("z.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}', "z.jsonl: is not UTF-8 at byte 25 (invalid start byte)"),
        ("z.jsonl", b'{"text": "a"}\n\n{"text"}', "z.jsonl:3: is not JSON (Expecting ':'"),
        ("z.jsonl", b"[" * 100_000, "z.jsonl:1: is not JSON"),
        (
            "z.jsonl",
            b'{"title": "a", "body": ""}',
            "z.jsonl:1: must be an object with the key 'text', found keys title, body; --field",
        ),
        ("z.jsonl", b"[1]", "z.jsonl:1: must be an object with the key 'text', found a list"),
        ("z.jsonl", b'{"text": null}', "z.jsonl:1: text: must be a text, found NoneType; --field names"),
        ("z.jsonl", rb'{"text": "a\ud83e"}', "z.jsonl:1: text: character 1 is half of a surrogate pair"),
    ],
)
def test_what_is_no_text_leaves_what_was_there(
    name: str, content: bytes, named: str, model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "_BATCH_BYTES", 1)
    (corpus := corpus_in(tmp_path, TEXTS) / name).write_bytes(content)
    (output := tmp_path / "tokens.npy").write_text("before")
    result = call("tokenize", corpus.parent, "--tokenizer", model, "-o", output)
    assert result.code == 2 and result.err.count("\n") == 1 and named in result.err, result.err
    assert output.read_text() == "before" and not list(tmp_path.glob(".*"))


def test_an_end_in_the_middle_leaves_nothing(model: Path, inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("tokenize", inputs.text, "--tokenizer", model, "-o", inputs.folder / "tokens.npy")
    before = sorted(inputs.folder.iterdir())
    usual, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        full = call(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, usual)
    assert full.code == 2 and "tokens.npy: cannot be written (File too large)" in full.err

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenize.ShareProgress, "__call__", interrupt)
    assert call(*words).code == 130
    assert sorted(inputs.folder.iterdir()) == before


def test_what_cannot_be_tokenized_is_one_line(model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    (text := tmp_path / "text").write_text("fox")
    (empty := tmp_path / "empty.txt").touch()
    (old := tmp_path / "old").mkdir()
    (old / "tokenizer.model").touch()
    output = tmp_path / "tokens.npy"
    for words, named in (
        (
            (tmp_path / "missing", "--tokenizer", model),
            f"TEXT: {tmp_path / 'missing'} cannot be read (No such file or directory)",
        ),
        ((old, "--tokenizer", model), f"TEXT: {old} holds no file that ends in .py, .txt, .md, .jsonl; name others one by one"),
        ((empty, "--tokenizer", model), f"TEXT: no text in 1 file ({empty})"),
        ((text, "--tokenizer", old), f"--tokenizer {old}: has tokenizer.model (SentencePiece) but no tokenizer.json"),
        ((text, "--tokenizer", tmp_path), f"--tokenizer {tmp_path}: {tmp_path / 'tokenizer.json'} cannot be read"),
        ((text, "--tokenizer", text), f"--tokenizer {text}: {text} cannot be read as tokenizer.json (expected"),
        ((text, "--tokenizer", model, "-o", tmp_path / "ids.bin"), "ids.bin: must end in .npy"),
        ((text, "--tokenizer", model, "-o", text / "ids.npy"), f"--output {text / 'ids.npy'}: cannot be written in {text}"),
    ):
        result = call("tokenize", "-o", output, *words)
        assert result.code == 2 and result.err.count("\n") == 1 and named in result.err, result.err
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = call("tokenize", text, "--tokenizer", model, "-o", output)
    assert result.code == 2 and "pip install 'hybridep[tokenizer]'" in result.err
    assert not output.exists()


def test_a_large_text_file_says_what_it_takes(model: Path, inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_LARGE_BYTES", 9000)
    result = call("tokenize", inputs.text, "--tokenizer", model, "-o", inputs.folder / "tokens.npy")
    assert result.code == 0 and f"{inputs.text} is one document, whose encoding takes about 990 kB of memory" in result.err
