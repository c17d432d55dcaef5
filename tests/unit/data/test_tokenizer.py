"""Text to numbers and back, by bytes and by files of the library tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from mixwell.data import tokenizer as module
from mixwell.data.sources import Texts
from mixwell.data.tokenizer import ByteTokenizer, TokenizerFile, load_tokenizer, train_tokenizer

CORPUS = [
    "the cat sat on the mat and the dog sat on the log\n" * 20,
    "größer als die 😀 Katze, 1234 mal!\n" * 20,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    return train_tokenizer([Texts(CORPUS)], size=300, path=tmp_path_factory.mktemp("bpe") / "bpe.json")


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.size, tokenizer.end, tokenizer.dtype) == (257, 256, np.dtype("<u2"))
    assert [ids.tolist() for ids in tokenizer.encode(["hé", ""])] == [[104, 195, 169], []]
    assert tokenizer.decode(np.array([104, 195, 169, 256, 105])) == "hé<|endoftext|>i"
    assert tokenizer.decode([195]) == "\ufffd"
    with pytest.raises(ValueError, match=r"there is no token 257 \(at 1\): the vocabulary has 257"):
        tokenizer.decode([1, 257])


def test_trained_tokenizer_round_trips(trained: TokenizerFile, tmp_path: Path) -> None:
    assert trained.size == 300
    assert trained.decode([trained.end]) == "<|endoftext|>"
    again = TokenizerFile(trained.path)
    other = train_tokenizer(
        [Texts(CORPUS[:1]), Texts(CORPUS[1:])], size=300, path=tmp_path / "new" / "bpe.json"
    )
    assert trained.identity == again.identity == other.identity
    text = "a cat on 😀\n\n  a log — naïve\u0301"
    assert trained.encode([text])[0].tolist() == again.encode([text])[0].tolist()
    assert trained.decode(trained.encode([text])[0]) == text
    assert len(trained.encode([CORPUS[0]])[0]) < len(CORPUS[0]) / 2
    assert trained.encode([""])[0].tolist() == trained.encode([]) == []
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["bpe.json"]


def test_training_progress(tmp_path: Path) -> None:
    told = list[int]()
    train_tokenizer(
        [Texts(CORPUS), Texts(["more"])], size=257, path=tmp_path / "bpe.json", progress=told.append
    )
    assert told[-1] == len("".join(CORPUS).encode()) + 4
    assert told == sorted(told)


def test_splitting_long_texts_keeps_tokens(trained: TokenizerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i}, cat\n\n   and dog {i * i}!\n" for i in range(3000))
    whole = trained.encode([text, "tail"])
    monkeypatch.setattr(module, "_SEGMENT", 1000)
    monkeypatch.setattr(module, "_BATCH", 5000)
    cut = trained.encode([text, "tail"])
    assert [ids.tolist() for ids in cut] == [ids.tolist() for ids in whole]


def test_impossible_training_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at least 257 tokens \(256 bytes and the end\), got 100"):
        train_tokenizer([Texts(CORPUS)], size=100, path=tmp_path / "bpe.json")
    with pytest.raises(ValueError, match=r"there is no text to train a tokenizer on \(nothing\); add text"):
        train_tokenizer([Texts([""], name="nothing")], size=300, path=tmp_path / "bpe.json")
    assert not list(tmp_path.iterdir())


def vocabulary_file(path: Path, tokens: dict[str, int]) -> Path:
    path.write_text(tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="?")).to_str())
    return path


def test_end_tokens(tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path / "a.json", {"?": 0, "</s>": 1, "[SEP]": 2, "<stop>": 70_000})
    tokenizer = TokenizerFile(path)
    assert (tokenizer.end, tokenizer.end_name) == (1, "</s>")
    # numbers may have gaps
    assert (tokenizer.size, tokenizer.dtype) == (70_001, np.dtype("<u4"))
    chosen = load_tokenizer("a.json", tmp_path, end="<stop>")
    assert chosen.end == 70_000
    assert chosen.identity != tokenizer.identity
    with pytest.raises(ValueError, match="a.json has no token <end> to put between documents; name the one"):
        TokenizerFile(path, end="<end>")
    bare = vocabulary_file(tmp_path / "b.json", {"?": 0})
    with pytest.raises(ValueError, match=r"b.json has no token <\|endoftext\|> or </s> or <eos> or \[SEP\]"):
        TokenizerFile(bare)


def test_truncation_and_padding_are_disabled(trained: TokenizerFile, tmp_path: Path) -> None:
    changed = tokenizers.Tokenizer.from_file(str(trained.path))
    changed.enable_truncation(2)
    changed.enable_padding(length=7)
    changed.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, tmp_path)
    assert tokenizer.encode(CORPUS)[0].tolist() == trained.encode(CORPUS)[0].tolist()


def test_loading(trained: TokenizerFile, tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(None, tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer("bytes", tmp_path), ByteTokenizer)
    assert load_tokenizer(trained.path.name, trained.path.parent).identity == trained.identity
    with pytest.raises(ValueError, match="cannot read the tokenizer .*missing.json: No such file"):
        load_tokenizer("missing.json", tmp_path)
    (tmp_path / "bad.json").write_text(json.dumps({"vocabulary": []}))
    with pytest.raises(ValueError, match="bad.json is not a tokenizer that the library tokenizers can load"):
        load_tokenizer("bad.json", tmp_path)
