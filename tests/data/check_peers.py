"""Exports read by the very packages that they are for: `make test-peers`, in an environment of its own."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from rollbook.app.exports import export_book
from rollbook.store import open_book
from web_book import TOKENIZER, make_book


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "book"
    make_book(path, versions=3, groups=2, samples=3)
    return path


def test_verl_makes_its_own_batch_of_it(book: Path, tmp_path: Path) -> None:
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    with open_book(book) as opened:
        export_book(opened, "verl", tmp_path / "verl")
        index = [json.loads(line) for line in (tmp_path / "verl" / "rows.jsonl").read_text().splitlines()]
    batch = DataProto.from_dict(**torch.load(tmp_path / "verl" / "part-00000.pt", weights_only=True))
    batch.check_consistency()
    assert len(batch) == len(index)
    again = DataProto.concat(batch.chunk(len(batch)))
    assert torch.equal(again.batch["input_ids"], batch.batch["input_ids"])
    # Its GRPO finds the groups by uid, and the rewards at the last token.
    advantages, _ = compute_grpo_outcome_advantage(
        batch.batch["rm_scores"], batch.batch["response_mask"].float(), np.array(batch.non_tensor_batch["uid"])
    )
    rewards = torch.tensor([row["reward"] for row in index])
    for uid in set(batch.non_tensor_batch["uid"]):
        mine = torch.tensor([value == uid for value in batch.non_tensor_batch["uid"]])
        if mine.sum() > 1 and rewards[mine].std() > 0:
            expected = (rewards[mine] - rewards[mine].mean()) / (rewards[mine].std() + 1e-6)
            torch.testing.assert_close(advantages[mine].amax(1) + advantages[mine].amin(1), expected)


def test_areal_pads_and_packs_it(book: Path, tmp_path: Path) -> None:
    from areal.utils.data import concat_padded_tensors, pack_tensor_dict

    with open_book(book) as opened:
        done = export_book(opened, "areal", tmp_path / "areal")
    rows = torch.load(tmp_path / "areal" / "part-00000.pt", weights_only=True)
    batch = concat_padded_tensors(rows)
    assert len(batch["input_ids"]) == done.n_rows
    packed = pack_tensor_dict(dict(batch))
    assert torch.equal(packed["input_ids"], torch.cat([row["input_ids"][0] for row in rows]))
    assert torch.equal(packed["logprobs"], torch.cat([row["logprobs"][0] for row in rows]))


@pytest.mark.parametrize("kind", ["prompt-completion", "preference", "unpaired", "messages"])
def test_trl_takes_it_as_conversations(kind: str, book: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast
    from trl.data_utils import apply_chat_template, is_conversational

    with open_book(book) as opened:
        done = export_book(opened, "trl", tmp_path / "trl.jsonl", kind=kind)
    rows = datasets.load_dataset("json", data_files=str(done.files[0]), split="train", cache_dir=str(tmp_path / "hf"))
    assert rows.num_rows == done.n_rows > 0
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER / "tokenizer.json"))
    tokenizer.chat_template = (TOKENIZER / "chat_template.jinja").read_text()
    for row in rows:
        given = {name: value for name, value in row.items() if value is not None}
        assert is_conversational(given)
        text = apply_chat_template(given, tokenizer)
        assert all(isinstance(text[name], str) for name in text.keys() & {"prompt", "completion", "chosen", "rejected"})
