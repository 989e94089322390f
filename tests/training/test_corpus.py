"""Reading, splitting and ordering of text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from lrmoe.training.documents import read_documents
from lrmoe.training.text import TrainingOrder, ValidationSet, tokenize
from lrmoe.training.tokenizer import byte_tokenizer, encode, load_tokenizer


def write_files(folder: Path, count: int, size: int = 100) -> Path:
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(f"{i:03}:" + "x" * size)
    return folder


def test_standard_library_is_the_default_and_repeats() -> None:
    first, second = read_documents(None), read_documents(None)
    assert first.names == second.names
    assert first.texts == second.texts
    assert "argparse.py" in first.names
    assert first.names == sorted(first.names, key=os.fsencode)
    assert sum(map(len, first.texts)) > 2_000_000
    folders = {part for name in first.names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__"}


def test_every_tenth_file_is_validation(tmp_path: Path) -> None:
    documents = read_documents(write_files(tmp_path, 20))
    text = tokenize(documents, byte_tokenizer(), seq=16)
    decoded = byte_tokenizer().decode(text.validation_N)
    assert [name[:3] for name in documents.names if f"{name[:3]}:" in decoded] == ["009", "019"]
    train = byte_tokenizer().decode(text.train_N)
    assert not any(f"{i:03}:" in train for i in (9, 19))
    assert all(f"{i:03}:" in train for i in range(20) if i not in (9, 19))


def test_one_file_is_split_at_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(32, 127)) * 20)
    text = tokenize(read_documents(path), byte_tokenizer(), seq=16)
    assert text.validation_N.numel() == 190
    whole = torch.cat([text.train_N, text.validation_N])
    assert torch.equal(whole, encode(byte_tokenizer(), [path.read_bytes()]))


def test_few_tiny_validation_files_fall_back_to_the_last_tenth(tmp_path: Path) -> None:
    write_files(tmp_path, 10)
    (tmp_path / "009.txt").write_text("short")
    text = tokenize(read_documents(tmp_path), byte_tokenizer(), seq=64)
    assert text.validation_N.numel() >= 64


def test_text_shorter_than_two_sequences_names_the_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    with pytest.raises(ValueError, match=r"has 100 tokens.*seq=64.*need 128.*shorter sequences"):
        tokenize(read_documents(path), byte_tokenizer(), seq=64)


def test_text_of_exactly_two_sequences_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 128)
    text = tokenize(read_documents(path), byte_tokenizer(), seq=64)
    assert (text.train_N.numel(), text.validation_N.numel()) == (64, 64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\0\1\2", "binary"),
        ("größe".encode("latin-1"), "not UTF-8"),
        ("text".encode("utf-16"), "cannot be used"),
    ],
)
def test_unusable_file_given_by_name_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents(path)


@pytest.mark.parametrize("name", ["missing", "bad\0name"])
def test_path_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_documents(tmp_path / name)


def test_pipe_given_by_name_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        read_documents(tmp_path / "pipe")


def test_folder_without_text_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no text.*no file in it"):
        read_documents(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"holds no text.*a\.bin.*binary"):
        read_documents(tmp_path)


def test_folder_skips_what_is_no_text_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.bin").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes("größe".encode("latin-1"))
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden too")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "sub" / "deep.txt").write_text("deep")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "zlink.txt").symlink_to(tmp_path / "good.txt")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "locked.txt").write_text("locked")
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "locked.txt":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    documents = read_documents(tmp_path)
    assert documents.names == ["good.txt", "sub/deep.txt"]
    assert documents.texts == [b"good", b"deep"]
    skipped = documents.skipped
    assert set(skipped) == {
        ".git", ".hidden", "binary.bin", "broken", "empty.txt", "latin.txt", "locked.txt", "pipe", "self",
        "sub/loop", "zlink.txt",
    }  # fmt: skip
    assert skipped["locked.txt"] == "permission denied"
    assert skipped["pipe"] == "not a regular file"
    assert skipped["sub/loop"] == "symbolic link to a folder"
    assert skipped["zlink.txt"] == "the same file under another name"
    assert "symbolic links" in skipped["self"]


def test_hostile_names_are_read_and_described(tmp_path: Path) -> None:
    names = [b"new\nline", b"[red]bold", b"-rf", b"caf\xe9 not utf-8", "ünïcode".encode(), b" "]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_text("x" * 60)
    documents = read_documents(tmp_path)
    assert sorted(map(os.fsencode, documents.names)) == sorted(names)
    json.dumps(tokenize(documents, byte_tokenizer(), seq=16).describe()).encode("utf-8")


def test_bytes_become_ids_as_the_tokenizer_has_them() -> None:
    tokenizer = byte_tokenizer()
    text = "def f():\n\treturn 'größe 中 🙂'\r\n"
    assert encode(tokenizer, [text.encode()]).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(encode(tokenizer, [text.encode()])) == text


@given(st.binary(max_size=40))
def test_any_bytes_become_ids(document: bytes) -> None:
    assert encode(byte_tokenizer(), [document]).tolist() == [byte + 3 for byte in document]


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "olmoe", "gpt_oss"])
def test_tokenizer_comes_back_beside_any_architecture(kind: str, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, 259)
    text = "a size\tgröße </x>"
    assert loaded(text)["input_ids"] == encode(loaded, [text.encode()]).tolist() == [byte + 3 for byte in text.encode()]


def test_text_goes_through_a_folders_own_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    assert encode(load_tokenizer(tmp_path, 3), [b"one two", b"three one"]).tolist() == [1, 2, 0, 1]


def test_text_that_looks_like_a_special_token_stays_text() -> None:
    ids = encode(byte_tokenizer(), [b"a</s>b"])
    assert byte_tokenizer().eos_token_id not in ids.tolist()
    assert ids.numel() == 6


def test_documents_are_parted_by_the_end_of_text_id() -> None:
    tokenizer = byte_tokenizer()
    assert encode(tokenizer, [b"a", b"b"]).tolist() == [100, tokenizer.eos_token_id, 101]


def test_memorize_takes_the_first_bytes_of_the_training_part(tmp_path: Path) -> None:
    documents = read_documents(write_files(tmp_path, 20))
    text = tokenize(documents, byte_tokenizer(), seq=16, memorize_bytes=150)
    assert text.validation_is_training
    assert torch.equal(text.train_N, text.validation_N)
    assert text.train_N.numel() == 151  # 104 bytes of the first file, the end-of-text id and 46 of the second.
    with pytest.raises(ValueError, match=r"memorize_bytes=8 gives 8 tokens.*seq=16"):
        tokenize(documents, byte_tokenizer(), seq=16, memorize_bytes=8)
    with pytest.raises(ValueError, match=r"memorize_bytes=99999 is more than the 1872 bytes"):
        tokenize(documents, byte_tokenizer(), seq=16, memorize_bytes=99999)


@given(sequences=st.integers(1, 9), length=st.integers(1, 40), seed=st.integers(0, 3))
def test_order_visits_every_sequence_once_a_pass(sequences: int, length: int, seed: int) -> None:
    stream = torch.arange(sequences * 4 + 3)
    order = TrainingOrder(stream, seq=4, length=length, seed=seed)
    starts = [int(order[i]["input_ids"][0]) // 4 for i in range(len(order))]
    assert len(starts) == length
    for begin in range(0, length, sequences):
        seen = starts[begin : begin + sequences]
        assert len(set(seen)) == len(seen)
        if len(seen) == sequences:
            assert set(seen) == set(range(sequences))


def test_order_depends_on_the_seed_alone() -> None:
    stream = torch.arange(400)
    orders = [TrainingOrder(stream, seq=4, length=100, seed=seed) for seed in (0, 0, 1)]
    starts = [[int(order[i]["input_ids"][0]) for i in range(100)] for order in orders]
    assert starts[0] == starts[1] != starts[2]
    torch.manual_seed(123)
    shorter = TrainingOrder(stream, seq=4, length=50, seed=0)
    assert [int(shorter[i]["input_ids"][0]) for i in range(50)] == starts[0][:50]


def test_validation_is_spread_over_the_stream() -> None:
    stream = torch.arange(1000)
    spread = ValidationSet(stream, seq=10, sequences=4)
    assert [int(spread[i]["input_ids"][0]) for i in range(len(spread))] == [0, 250, 500, 750]
    assert len(ValidationSet(stream, seq=300, sequences=4)) == 3
