"""A model's folder trains with every promise of a task: the same bits on any number of workers and through a death."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from raytrain_plus import Data, Evaluate, Job, Parallel, Workers
from raytrain_plus.cli.main import main
from raytrain_plus.runs.export import Which, export_to
from tests.integration.elastic import Run, ended, job
from tests.support.pretrained import bert, llama, qwen3_moe

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(30))]
STEPS = 16


def write_folder(folder: Path, model: Any) -> Path:
    """Write a model of that kind, and a tokenizer of a token for each word."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def texts(folder: Path, rows: int = 300) -> Path:
    """Write rows of text of uneven lengths, with a label each."""
    draw = torch.Generator().manual_seed(3)
    numbers = [torch.randint(30, (2 + row % 9,), generator=draw).tolist() for row in range(rows)]
    labels = [sum(one) % 2 for one in numbers]
    folder.mkdir()
    table = pa.table({"text": [" ".join(f"w{n}" for n in one) for one in numbers], "label": labels})
    pq.write_table(table, folder / "rows.parquet", row_group_size=40, write_page_checksum=True)
    return folder


def made(build: Callable[..., Any]) -> Any:
    """Return a model of two layers, always with the same values."""
    torch.manual_seed(0)
    return build(hidden_size=32, intermediate_size=64, num_hidden_layers=2)


def brought(tmp_path: Path, name: str, folder: Path, **changes: Any) -> Job:
    """Return a job that trains the model in a folder on the texts."""
    data = str(tmp_path / "data")
    settings: dict[str, Any] = {
        "task": "raytrain_plus.bring:Model",
        "steps": STEPS,
        "reduction": "exact",
        "data": Data(path=data, tokenizer=str(folder), batch_size=24, shards=6),
        "evaluate": Evaluate(path=data, every_steps=8),
        "args": {"folder": str(folder), "learning_rate": 1e-3, **changes.pop("args", {})},
        **changes,
    }
    found = job(tmp_path, name=name, **settings)
    # The folder of faults is not for this task.
    return Job(**{**vars_of(found), "args": settings["args"]})


def vars_of(made: Job) -> dict[str, Any]:
    return {name: getattr(made, name) for name in made.__dataclass_fields__}


def test_a_folder_with_another_head_trains_to_the_same_bits_through_a_death_and_opens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "bert", made(bert))
    texts(tmp_path / "data")
    args = {"head": "SequenceClassification"}
    expected = ended(Run(brought(tmp_path, "one", folder, args=args, workers=Workers(min=1))))
    assert expected[1][-1] < expected[1][0]
    run = Run(brought(tmp_path, "killed", folder, args=args, workers=Workers(min=2, max=3)))
    run.until_step(4)
    run.kill(run.members()[-1])
    assert ended(run) == expected
    assert run.events("recovered")
    [said] = [event["text"] for event in run.events("noted") if "trained from new" in event["text"]]
    assert said.startswith(f"{folder} has no weights for bert.pooler")
    to = tmp_path / "exported"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["export", str(run.folder), "--format", "transformers", "--to", str(to)])
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(to)
    saved = safetensors.torch.load_file(run.folder / "model.safetensors")
    assert saved.keys() <= opened.state_dict().keys()
    assert all(torch.equal(value, opened.state_dict()[name]) for name, value in saved.items())
    batch = transformers.AutoTokenizer.from_pretrained(to)("w1 w2", return_tensors="pt")
    assert opened(input_ids=batch["input_ids"]).logits.shape == (1, 2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_an_adapter_is_all_that_a_run_saves_and_both_exports_open(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", made(llama))
    texts(tmp_path / "data")
    args = {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}, "learning_rate": 1e-2}
    expected = ended(Run(brought(tmp_path, "one", folder, args=args, workers=Workers(min=1))))
    assert expected[1][-1] < expected[1][0]
    run = Run(brought(tmp_path, "killed", folder, args=args, workers=Workers(min=2, max=3)))
    run.until_step(4)
    run.kill(run.members()[-1])
    assert ended(run) == expected
    assert run.events("recovered")
    saved = json.loads(max((run.folder / "checkpoints").glob("*.json")).read_text())["tensors"]
    weights = [name for name in saved if name.startswith(("param/", "optim/"))]
    assert weights
    assert all("lora_" in name for name in weights)

    for kind in ("adapter", "transformers"):
        export_to(str(run.folder), "", tmp_path / kind, kind, Which())
    adapter = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    trained = safetensors.torch.load_file(run.folder / "model.safetensors")
    assert {name.replace(".default", ""): value.tolist() for name, value in trained.items()} == {
        name: value.tolist() for name, value in adapter.items()
    }
    ids = torch.tensor([[4, 5, 6]])
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "transformers")
    assert torch.allclose(opened(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-5)
    assert merged.generate(ids, max_new_tokens=3, min_new_tokens=3).shape == (1, 6)


def test_a_causal_model_is_sharded_or_cut_by_its_own_plan_and_generates(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", made(llama))
    texts(tmp_path / "data")
    two = {"workers": Workers(min=2)}
    expected = ended(Run(brought(tmp_path, "one", folder, workers=Workers(min=1))))
    sharded = Run(brought(tmp_path, "sharded", folder, parallel=Parallel(sharded="optimizer"), **two))
    assert ended(sharded) == expected
    cut = Run(brought(tmp_path, "cut", folder, parallel=Parallel(tensor=2), **two))
    assert ended(cut)[1] == pytest.approx(expected[1], rel=1e-4)
    to = tmp_path / "exported"
    export_to(str(cut.folder), "", to, "transformers", Which())
    opened = transformers.AutoModelForCausalLM.from_pretrained(to)
    assert opened.generate(torch.tensor([[4, 5]]), max_new_tokens=3, min_new_tokens=3).shape == (1, 5)


def test_the_experts_of_a_sparse_model_are_divided_through_a_death_and_it_generates(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "sparse", made(qwen3_moe))
    texts(tmp_path / "data")
    divided = {"parallel": Parallel(experts=2)}
    expected = ended(Run(brought(tmp_path, "one", folder, workers=Workers(min=1), **divided)))
    assert expected[1][-1] < expected[1][0]
    run = Run(brought(tmp_path, "killed", folder, workers=Workers(min=1, max=2, cpus=2), **divided))
    run.until_size(2)
    run.until_step(4)
    run.kill(run.members()[-1])
    assert ended(run) == expected
    assert [one["steps_lost"] for one in run.events("recovered")] == [0]
    assert {tuple(one["slices"]) for one in run.events("view_formed")[0]["members"]} == {(0,), (1,)}
    to = tmp_path / "exported"
    export_to(str(run.folder), "", to, "transformers", Which())
    opened = transformers.AutoModelForCausalLM.from_pretrained(to)
    assert opened.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 64, 32)
    assert opened.generate(torch.tensor([[4, 5]]), max_new_tokens=3, min_new_tokens=3).shape == (1, 5)
