"""An adapter is trained beside a frozen model: only it is in the state, and exports open with `peft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from raytrain_plus.bring import Model
from raytrain_plus.bring.lora import with_adapter
from raytrain_plus.errors import InputError, TaskError
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.runs.pretrained_folder import write_adapter, write_folder
from raytrain_plus.state.holding import model_state
from raytrain_plus.task import RunFacts
from raytrain_plus.training.model.model import build_model, model_without_values
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from tests.support.pretrained import bert, gpt2, llama, rows, saved, t5, trained

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

CPU = torch.device("cpu")
TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "t5": ["q", "v"], "bert": ["query", "value"]}
MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5, "bert": bert}


def built(**args: Any) -> Any:
    return build_task(Model, {"learning_rate": 1e-2, **args}, RunFacts(total_steps=30, batch_size=8))


def adapted(folder: Path, kind: str, **args: Any) -> Any:
    lora = {"r": 4, "target_modules": TARGETS[kind]}
    return built(**{"folder": str(folder), "lora": lora, **args})


def arguments(task: Any, kind: str) -> dict[str, Any]:
    batch = task.collate(rows(kind))
    return {name: value for name, value in batch.items() if name != "labels" or kind == "t5"}


@pytest.mark.parametrize("kind", TARGETS)
def test_an_adapter_is_trained_and_exports_open(tmp_path: Path, kind: str) -> None:
    task = adapted(saved(tmp_path / "base", kind), kind)
    model, losses = trained(task, rows(kind), 30)
    assert losses[-1] < losses[0]
    assert {name for name, value in model.named_parameters() if value.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    model.eval()
    given = arguments(task, kind)
    expected = model(**given).logits
    plain = MODELS[kind]().from_pretrained(tmp_path / "base").eval()
    assert not torch.allclose(plain(**given).logits, expected, atol=1e-4)

    write_adapter(model, tmp_path / "adapter", [tmp_path / "base"])
    assert {"adapter_config.json", "adapter_model.safetensors", "vocab.txt"} <= {
        file.name for file in (tmp_path / "adapter").iterdir()
    }
    opened = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert torch.equal(opened(**given).logits, expected)

    write_folder(model, tmp_path / "merged", [tmp_path / "base"])
    merged = MODELS[kind]().from_pretrained(tmp_path / "merged").eval()
    assert type(merged) is type(MODELS[kind]())
    assert torch.allclose(merged(**given).logits, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_state_has_the_adapter_and_digests_of_the_model(tmp_path: Path, kind: str) -> None:
    task = adapted(saved(tmp_path, kind), kind)
    state = TrainState(task, [build_model(task, 0, CPU)], Summing(2), seed=0)
    names = {str(key) for key in model_state(state.holding())}
    assert {name for name in names if name.startswith("param/")} == {
        f"param/{name}" for name, value in state.module.named_parameters() if value.requires_grad
    }
    assert {name for name in names if name.startswith("rebuilt/")} == {
        f"rebuilt/{name}" for name, value in state.module.named_parameters() if not value.requires_grad
    }


def test_a_new_head_is_trained_as_a_whole(tmp_path: Path) -> None:
    folder = saved(tmp_path, bert("BertModel"))
    task = adapted(folder, "bert", head="SequenceClassification", config={"num_labels": 3})
    state = TrainState(task, [build_model(task, 0, CPU)], Summing(2), seed=0)
    heads = {str(key) for key in model_state(state.holding()) if "classifier" in str(key)}
    prefix = "param/base_model.model.classifier"
    assert heads == {
        f"{prefix}.{of}.{kind}" for of in ("modules_to_save.default", "original_module") for kind in ("weight", "bias")
    }, "what peft keeps beside it is drawn, not read, so it is saved"
    assert "classifier" in str(task.remarks())


def test_a_frozen_model_keeps_its_dtype_beside_a_float32_adapter(tmp_path: Path) -> None:
    task = adapted(saved(tmp_path, llama().bfloat16()), "llama")
    model, losses = trained(task, rows("llama"), 30)
    assert losses[-1] < losses[0]
    kinds = {value.requires_grad: value.dtype for _, value in model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


def adapted_gpt2() -> nn.Module:
    transformers.set_seed(3)
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def test_a_function_may_return_a_model_with_an_adapter() -> None:
    task = built(build=f"{__name__}:adapted_gpt2")
    _, losses = trained(task, rows("gpt2"), 30)
    assert losses[-1] < losses[0]
    state = TrainState(task, [build_model(task, 0, CPU)], Summing(2), seed=0)
    assert all("lora_" in str(key) for key in model_state(state.holding()) if str(key).startswith("param/"))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"r": 4, "target_modules": ["nothing"]}, "Target modules"),
        ({"rank": 4}, "rank"),
        ({"r": 0, "target_modules": ["query"]}, "positive"),
    ],
)
def test_settings_that_peft_does_not_take_are_an_error(tmp_path: Path, lora: dict[str, Any], said: str) -> None:
    task = built(folder=str(saved(tmp_path, "bert")), lora=lora)
    with pytest.raises(TaskError, match=said) as found:
        task.model()
    assert found.value.where == "args.lora"
    assert "the model has word_embeddings, " in found.value.expected


def test_a_model_without_an_adapter_has_none_to_write(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no adapter of peft"):
        write_adapter(gpt2(), tmp_path / "x", [])


@pytest.mark.parametrize(
    ("kind", "targets"), [("gpt2", ["wte"]), ("gpt2", ["wte", "c_attn"]), ("tied", ["lm_head", "q_proj"])]
)
def test_a_tied_layer_with_an_adapter_is_merged_alone(tmp_path: Path, kind: str, targets: list[str]) -> None:
    base = llama(tie_word_embeddings=True) if kind == "tied" else gpt2()
    task = built(folder=str(saved(tmp_path / "base", base)), lora={"r": 4, "target_modules": targets})
    model, _ = trained(task, rows("gpt2"), 30)
    ids = torch.tensor([[4, 5, 6]])
    expected = model.eval()(input_ids=ids).logits
    write_folder(model, tmp_path / "merged", [])
    merged = type(base).from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(merged(input_ids=ids).logits, expected, atol=1e-5)


def test_new_weights_that_no_adapter_trains_are_an_error(tmp_path: Path) -> None:
    model = bert("BertForMaskedLM")
    folder = saved(tmp_path, model)
    args = {"head": "SequenceClassification", "config": {"num_labels": 3}}
    with pytest.raises(TaskError, match=r"no weights for bert\.pooler\.dense\.bias, bert\.pooler") as found:
        adapted(folder, "bert", **args).model()
    assert found.value.remedy == "train them as a whole: modules_to_save: [bert.pooler.dense]"
    lora = {"target_modules": ["query"], "modules_to_save": ["pooler"]}
    model = adapted(folder, "bert", **args, lora=lora).model()
    assert {name for name, value in model.named_parameters() if value.requires_grad and "lora" not in name} == {
        f"base_model.model.{of}.{kind}"
        for of in ("bert.pooler.modules_to_save.default.dense", "classifier.modules_to_save.default")
        for kind in ("weight", "bias")
    }


def test_a_new_head_over_a_bfloat16_model_is_float32_and_learns(tmp_path: Path) -> None:
    folder = saved(tmp_path, bert("BertModel").bfloat16())
    task = adapted(folder, "bert", head="SequenceClassification", config={"num_labels": 3})
    table = rows("bert").drop_columns("labels").append_column("labels", [[0, 1, 2, 0, 1, 2, 0, 1]])
    model, losses = trained(task, table, 30)
    assert losses[-1] < losses[0] * 0.95
    kinds = {value.requires_grad: value.dtype for name, value in model.named_parameters() if "original" not in name}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    empty = model_without_values(task)
    assert empty is not None
    assert {name: value.dtype for name, value in empty.named_parameters()} == {
        name: value.dtype for name, value in model.named_parameters()
    }


def test_weights_from_which_an_adapter_subtracts_are_saved(tmp_path: Path) -> None:
    """Their bits depend on the machine that computed the adapter's beginning."""
    folder = saved(tmp_path, "llama")
    lora = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "pissa"}
    task = built(folder=str(folder), lora=lora)
    assert [name for name in task.rebuilt() if "q_proj" in name] == []
    assert [name for name in task.rebuilt() if "v_proj" in name]


def test_a_model_that_takes_no_tokens_has_no_task_of_peft() -> None:
    config = transformers.WhisperConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=10,
        max_target_positions=10,
        num_mel_bins=4,
        pad_token_id=0,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    model: Any = with_adapter(
        transformers.WhisperForConditionalGeneration(config), {"r": 2, "target_modules": ["q_proj"]}, (), "args.lora"
    )
    found = model(input_features=torch.randn(2, 4, 20), labels=torch.tensor([[3, 4], [5, 6]]))
    assert found.loss.isfinite()


def test_an_adapter_that_cannot_be_merged_is_written_as_one(tmp_path: Path) -> None:
    prompted = peft.get_peft_model(gpt2(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(InputError, match="cannot be merged") as found:
        write_folder(prompted, tmp_path / "x", [])
    assert found.value.remedy == "--format adapter"
    named = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True), "mine")
    write_adapter(named, tmp_path / "y", [])
    assert (tmp_path / "y" / "mine" / "adapter_config.json").is_file()
    assert (tmp_path / "y" / "mine").stat().st_mode & 0o100
