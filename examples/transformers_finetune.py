"""Run and fine-tune a mixture of experts of Hugging Face transformers on a CPU.

    python examples/transformers_finetune.py

A small Qwen3-MoE with random weights learns Python code with the experts of moe_ext. Then the model
is saved and loaded again with transformers' own experts. The weights are identical, and the logits
agree to rounding. To use a model of the hub, replace ``new_model()`` by its name. The script needs
``pip install 'transformers>=5.23'`` and downloads nothing:

    experts: moe_ext
    step  1: loss 5.64
    step 10: loss 3.03
    step 20: loss 2.64
    step 30: loss 2.75
    step 40: loss 2.33
    step 50: loss 2.28
    reloaded, experts: eager
    weights are identical: True
    largest logit 7.34, largest difference 0.0000
    greedy continuations are identical: True
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import moe_ext.integrations.transformers  # noqa: F401  registers "moe_ext"

BATCH, LENGTH, STEPS = 8, 128, 50
TEXT = Path(argparse.__file__)  # any text file


def new_model(folder: Path) -> Path:
    """Saves a small model with random weights and a tokenizer of bytes; returns the folder."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(name: str | Path, experts: str) -> Any:
    """Loads a model with an implementation of its experts; the config decides its class."""
    return AutoModelForCausalLM.from_pretrained(name, experts_implementation=experts)


def batch(text: Tensor) -> Tensor:
    """Returns random pieces [BATCH, LENGTH] of the text."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
    return text[starts + torch.arange(LENGTH)]


def main() -> None:
    """Runs the example."""
    torch.manual_seed(1)
    folder = Path(tempfile.mkdtemp())
    name = new_model(folder / "new")  # or a name of the hub, such as "allenai/OLMoE-1B-7B-0924"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = load(name, experts="moe_ext")
    print(f"experts: {model.get_experts_implementation()['']}")

    text = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # 1e-5 for a trained model
    model.train()
    for step in range(1, STEPS + 1):
        ids = batch(text)
        loss = model(input_ids=ids, labels=ids).loss  # transformers shifts the labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step:2}: loss {loss.item():.2f}")

    model.save_pretrained(folder / "tuned")
    model.eval()
    plain = load(folder / "tuned", experts="eager")
    print(f"reloaded, experts: {plain.get_experts_implementation()['']}")
    weights = plain.state_dict()
    identical = all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    print(f"weights are identical: {identical}")
    with torch.no_grad():
        logits, plain_logits = (m(input_ids=ids).logits for m in (model, plain))
    difference = (logits - plain_logits).abs().max()
    print(f"largest logit {logits.abs().max():.2f}, largest difference {difference:.4f}")
    prompt = tokenizer("def main(", add_special_tokens=False, return_tensors="pt")
    first, second = (
        m.generate(**prompt, max_new_tokens=32, do_sample=False) for m in (model, plain)
    )
    print(f"greedy continuations are identical: {torch.equal(first, second)}")


if __name__ == "__main__":
    main()
