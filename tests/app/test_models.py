"""A prepared model is whole, the same each time, and what its authors trained; one that is not says why."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.app import models
from rollbook.app.models import ModelUnavailable, prepare_model

HI = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
]
# The template inside the model's own GGUF.
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_tiny_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_model("tiny", cache_dir=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 103_168
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2
    ids = tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(ids["input_ids"][0]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with torch.inference_mode():
        assert model(**ids).logits.isfinite().all()
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [folder.name]


def test_tiny_is_the_same_model_every_time(tmp_path: Path) -> None:
    one, other = (prepare_model("tiny", cache_dir=tmp_path / name) for name in "ab")
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in other.iterdir()}


def test_a_prepared_model_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare_model("tiny", cache_dir=tmp_path)
    monkeypatch.setitem(models.RECIPES, "tiny", (folder.name, lambda *_: pytest.fail("built twice")))
    assert prepare_model("tiny", cache_dir=tmp_path) == folder
    assert prepare_model(folder) == folder


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLBOOK_CACHE", str(tmp_path / "elsewhere"))
    assert prepare_model("tiny").is_relative_to(tmp_path / "elsewhere")


def test_two_processes_may_prepare_the_same_model_at_once(tmp_path: Path) -> None:
    script = f"from rollbook.app.models import prepare_model; print(prepare_model('tiny', cache_dir={str(tmp_path)!r}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    folders = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1
    assert len(list((tmp_path / "models").iterdir())) == 1


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(folder: Path, progress: models.Progress) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(models.RECIPES, "tiny", ("tiny-1", fill_the_disk))
    with pytest.raises(ModelUnavailable, match=r"No space left on device.*ROLLBOOK_CACHE"):
        prepare_model("tiny", cache_dir=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_model_is_one_sentence_with_the_path_and_what_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(
        ModelUnavailable, match=r"no model at .*/nowhere: expected a name \(smollm2-135m or tiny\) or a"
    ):
        prepare_model(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_folder_that_is_not_whole_is_refused_by_the_missing_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(prepare_model("tiny", cache_dir=tmp_path), folder)
    assert prepare_model(folder) == folder
    (folder / name).unlink()
    with pytest.raises(ModelUnavailable, match=name.replace("model.", r"\*.")):
        prepare_model(folder)


@pytest.mark.parametrize("messages", [HI, TALK, TALK[1:]])
@pytest.mark.parametrize("prompts", [False, True])
def test_smollm2_without_tools_renders_as_its_authors_render_it(messages: list[dict[str, str]], prompts: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = models.SMOLLM2_SYSTEM + (models.BYTES_TOKENIZER / "chat_template.jinja").read_text("utf-8")
    (mine,), _ = render_jinja_template([messages], chat_template=ours, add_generation_prompt=prompts)
    (theirs,), _ = render_jinja_template([messages], chat_template=SMOLLM2_TEMPLATE, add_generation_prompt=prompts)
    assert mine == theirs


@pytest.mark.slow
def test_smollm2_is_the_real_model(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said: list[str] = []
    folder = prepare_model("smollm2-135m", cache_dir=tmp_path, progress=lambda what, fraction: said.append(what))
    assert said
    assert {p.name for p in folder.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("def f(x):\n    return x1 + 12345", "日本語 🎉 é", "a  12", "<|im_start|>user\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == json.loads((folder / "config.json").read_bytes())["eos_token_id"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("config.json", b"{bad", r"config\.json is not JSON"),
        ("config.json", b"[]", r"config\.json must hold a JSON object, got list"),
        ("config.json", b"{}", r"config\.json names no model_type"),
        ("tokenizer.json", b"{bad", r"tokenizer\.json is not JSON"),
        ("tokenizer_config.json", b"\xff", r"tokenizer_config\.json is not JSON"),
        ("model.safetensors", b"not one", r"model\.safetensors is not a safetensors file"),
        ("model.safetensors", None, r"model\.safetensors has \d+ bytes where \d+ are expected"),
    ],
)
def test_a_folder_with_a_broken_file_is_refused_by_its_name(
    tmp_path: Path, name: str, content: bytes | None, expected: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(prepare_model("tiny", cache_dir=tmp_path), folder)
    file = folder / name
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ModelUnavailable, match=expected):
        prepare_model(folder)
