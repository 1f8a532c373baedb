"""`make test-sdks`: Hugging Face's own loader behind `get_custom_dataset`, on files of this disk."""

import json
from pathlib import Path

import pytest

from rollbook.agents.data import get_custom_dataset, tasks_of
from rollbook.agents.errors import DataError

ROWS = [{"id": f"r{i}", "messages": [{"role": "user", "content": f"{i}+{i}?"}], "answer": str(2 * i)} for i in range(5)]


def test_a_dataset_of_the_hub_library_gives_the_same_tasks_as_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    read = get_custom_dataset("train", path="json", data_files={"train": str(path)}, cache_dir=str(tmp_path / "c"))
    assert [dict(task.row) for task in tasks_of(read)] == ROWS
    assert [task.task_id for task in tasks_of(read)] == [row["id"] for row in ROWS]
    with pytest.raises(DataError, match="split 'test'"):
        get_custom_dataset("test", path="json", data_files={"train": str(path)}, cache_dir=str(tmp_path / "c"))


def test_a_dataset_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="Hugging Face dataset 'nobody/nothing', split 'train': "):
        get_custom_dataset("train", path="nobody/nothing", cache_dir=str(tmp_path))
