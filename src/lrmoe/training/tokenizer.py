"""Tokens of a text: bytes by default, or the tokenizer that a checkpoint folder brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrmoe.training.presets import has_tokenizer

# The order of ByT5: pad, end of text and unknown come before the 256 bytes.
_SPECIAL = ("<pad>", "</s>", "<unk>")
_OFFSET = len(_SPECIAL)


def byte_tokenizer() -> Any:
    """A Transformers tokenizer with one id a byte: id = byte + 3, end of text = 1, 259 ids in all.

    Built from the ``tokenizers`` library's byte-level parts without a single merge, so that ``AutoTokenizer`` loads it
    beside a model of any architecture.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, end, unknown = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )


def _byte_vocabulary() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = {token: i for i, token in enumerate(_SPECIAL)}
    return special | {character: byte + _OFFSET for byte, character in bytes_to_unicode().items()}


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of a checkpoint folder, or the byte tokenizer where the folder has none, which the commands say.

    Raises:
        ValueError: if it is broken, or has more ids than the model has embeddings.
    """
    from transformers import AutoTokenizer

    brings = has_tokenizer(folder)
    if brings:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # Whatever a broken file makes a tokenizer library raise.
            reason = " ".join(str(error).split())
            raise ValueError(f"the tokenizer in model={str(folder)!r} cannot be loaded: {reason}") from error
    else:
        tokenizer = byte_tokenizer()
    if len(tokenizer) > vocab_size:
        if brings:
            raise ValueError(
                f"the tokenizer in model={str(folder)!r} has {len(tokenizer)} ids, its config.json only "
                f"vocab_size={vocab_size}: it is of another model; put the tokenizer there that this one was trained "
                "with"
            )
        raise ValueError(
            f"model={str(folder)!r} brings no tokenizer, and text taken as bytes has {len(tokenizer)} ids, which are "
            f"more than the vocab_size={vocab_size} of its config.json: save its own tokenizer there "
            f"(tokenizer.save_pretrained), or make the model with a vocab_size of {len(tokenizer)} or more"
        )
    return tokenizer


def takes_bytes(tokenizer: Any) -> bool:
    """Whether it is the byte tokenizer, built here or read back from a checkpoint."""
    return bool(tokenizer.get_vocab() == _byte_vocabulary())


def encode(tokenizer: Any, documents: list[bytes]) -> Tensor:
    """One stream of token ids (n,), int32, with the end-of-text id between documents where the tokenizer has one.

    The byte tokenizer takes the bytes as they are: text that looks like a special token stays text.
    """
    separator = torch.tensor(
        [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id], dtype=torch.int32, device="cpu"
    )
    is_bytes = takes_bytes(tokenizer)
    parts: list[Tensor] = []
    for document in documents:
        if is_bytes:
            ids = torch.from_numpy(np.frombuffer(document, dtype=np.uint8).astype(np.int32)) + _OFFSET
        else:
            text = document.decode("utf-8", errors="strict")
            ids = torch.tensor(
                tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int32, device="cpu"
            )
        parts += [separator, ids]
    return torch.cat(parts[1:]) if parts else torch.empty(0, dtype=torch.int32, device="cpu")
