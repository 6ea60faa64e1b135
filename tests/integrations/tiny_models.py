"""Tiny models of transformers, and comparisons of their results."""

import functools

import pytest
import torch
import transformers

import moe_ext.integrations.transformers  # noqa: F401  (registers "moe_ext")

ONE_GRAPH = torch.__version__ >= "2.12"  # torch 2.11 breaks the graph at the experts

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
MODEL_TYPES = {
    "qwen3_moe": {"num_experts": 6},
    "mixtral": {"num_local_experts": 6},
    "olmoe": {"num_experts": 6},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 8}
    | {
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
    }
    | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "gpt_oss": {"num_local_experts": 6},
}


PADDED = torch.tensor([[0, 0, 0, 5, 7, 11], [1, 2, 3, 4, 5, 6]])  # padding at the left


@functools.cache
def tokens():
    return torch.randint(1, 48, (2, 9), generator=torch.Generator().manual_seed(1))


def tiny_config(model_type, **options):
    own = MODEL_TYPES.get(model_type, {})
    options = {**SIZES, **own, "pad_token_id": 0, **options}
    return transformers.AutoConfig.for_model(model_type, **options)


def tiny(model_type="qwen3_moe", implementation="moe_ext", **options):
    config = tiny_config(model_type, **options)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation
    )


def logits_of(model):
    with torch.no_grad():
        return model(tokens()).logits


def losses_of(model):
    """Returns the logits and the gradient of each parameter."""
    model.zero_grad()
    output = model(tokens(), labels=tokens())
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": output.logits.detach(), **gradients}


def assert_close(actual, expected, tolerance=1e-5):
    for name, wanted in expected.items():
        assert (actual[name] is None) == (wanted is None), name
        if wanted is not None:
            assert error(actual[name], wanted) < tolerance, name


def error(actual, expected):
    """Returns the largest difference, relative to the largest value expected."""
    scale = expected.double().abs().max().clamp(min=1e-30)
    return float((actual.double() - expected.double()).abs().max() / scale)


def trainer(model, folder, num_rows=16, callbacks=(), **options):
    """Makes a Trainer on random tokens; the data are the same for each call."""
    pytest.importorskip("accelerate")
    rows = torch.randint(1, 48, (num_rows, 9), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": ids, "labels": ids} for ids in rows]
    arguments = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **(arguments | options)),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[*callbacks],
    )
