"""Compares balancing losses while adapters of a mixture of transformers learn another text.

    pip install './lab[transformers]'
    moe-lab study fine-tuning
    moe-lab study fine-tuning --corpus CORPUS --target OTHER --seeds 1 2 3
    moe-lab study fine-tuning --report

Trains a small Qwen3-MoE of transformers on a corpus for each seed, with the balancing loss of
transformers. Then the experts are packed in MXFP4. Their adapters (LoRA) and the routers are
trained on the sentences of another corpus that the first one lacks, by default Python and C++ code.
All other parameters are frozen. The losses that are compared: none, that of transformers, which
pools all layers, with two weights, and the importance loss of each layer (Eq. 7). A run takes
10 minutes on one processor.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from moe_ext import add_lora
from moe_lab.data import EncodedSentences
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import Judged, as_change, judged, verdict
from moe_lab.experiments.page import Page, Plot, new_axes
from moe_lab.experiments.runs import ArmRuns, PairedDifference, Run, number_of
from moe_lab.experiments.store import Stored
from moe_lab.experiments.study import Study
from moe_lab.markdown import markdown_table
from moe_lab.models import evaluating
from moe_lab.packages import require_transformers
from moe_lab.progress import progress
from moe_lab.studies.entries import usual_options
from moe_lab.studies.lora import target_text
from moe_lab.training.config import DataConfig
from moe_lab.training.metrics import perplexity
from moe_lab.training.text import load_text

MODEL = "qwen3-moe"
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
LENGTH, BATCH, TEST_ROWS = 128, 10, 800  # tokens of a row, rows of a batch and of the test part
RANK, ALPHA = 16, 32
BASE_RATE, RATE = 3e-3, 2e-3
BASE_WEIGHT = 0.001  # of transformers' loss: the default of Qwen3-MoE


class Loss(NamedTuple):
    """The weights of the balancing losses of an adaptation."""

    pooled: float = 0.0  # the router_aux_loss_coef of transformers' loss
    layers: float = 0.0  # the w_importance of the loss of each layer


NONE, POOLED, LAYERS = "none", "pooled 0.01", "each layer 0.01"
LOSSES = {
    NONE: Loss(),
    "pooled 0.001": Loss(pooled=0.001),  # the default of Qwen3-MoE
    POOLED: Loss(pooled=0.01),  # the default of OLMoE
    LAYERS: Loss(layers=0.01),
}
DEAD = 0.01  # an expert with less than this fraction of its layer's mean load


class FineTuning(Study):
    name = "fine_tuning"
    models = usual = (MODEL,)
    own = usual_options("fine-tuning", "pieces", "steps", "lora_steps")

    train: Tensor
    target: dict[str, Tensor]

    def settings(self) -> dict[str, Any]:
        require_transformers("moe-lab study", "moe_ext.integrations.transformers")
        torch.set_num_threads(1)
        options = self.options
        data = DataConfig(options.corpus, kind="unigram", vocab_size=options.pieces)
        text = load_text(data)
        target = target_text(text, options.corpus, options.target)
        self.train = rows_of(text.train)
        self.target = {part: rows_of(sentences) for part, sentences in target.items()}
        self.target["test"] = self.target["test"][:TEST_ROWS]
        return {
            "train": text.train.fingerprint(),
            "target_train": target["train"].fingerprint(),
            "target_test": target["test"].fingerprint(),
            **self.own_settings(),
        }

    def run(self, arm: Arm, seed: int) -> Run:
        from moe_ext.integrations.transformers import quantize_experts

        torch.manual_seed(seed)
        base = make_model(self.options.pieces)
        learn(base, self.train, self.options.steps, BASE_RATE, Loss(pooled=BASE_WEIGHT), seed)
        quantize_experts(base, "mxfp4", quiet=True)
        results: dict[str, Any] = {"before": test(base, self.target["test"]), "tuned": {}}
        for name, loss in LOSSES.items():
            model = copy.deepcopy(base)
            torch.manual_seed(seed)  # equal adapters for all losses
            add_lora(model, RANK, ALPHA)
            for parameter in routers(model):
                parameter.requires_grad_()
            learn(model, self.target["train"], self.options.lora_steps, RATE, loss, seed)
            results["tuned"][name] = test(model, self.target["test"])
            results["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return results

    def page(self, stored: Stored) -> Page | None:
        runs, settings = stored.by_arm()[Arm(MODEL)], stored.settings
        rows = [["before", *_cells(runs, "before")]]
        rows[0].insert(2, "")
        for name in LOSSES:
            ppl, *balance = _cells(runs, "tuned", name)
            change = "" if name == NONE else as_change(_gap(runs, name, NONE, "nll"))
            rows.append([name, ppl, change, *balance])
        header = ["balancing loss", "test ppl", f"change from {NONE}, 95%"]
        header += ["experts without tokens", "dead experts", "max/mean load"]
        experts = SIZES["num_hidden_layers"] * SIZES["num_experts"]
        return self.filled(
            stored,
            plot=plot(list(runs.values())),
            losses=markdown_table(header, rows),
            k=SIZES["num_experts_per_tok"],
            n=SIZES["num_experts"],
            layers=SIZES["num_hidden_layers"],
            experts=experts,
            rank=RANK,
            alpha=ALPHA,
            trained=next(iter(runs.values()))["trained"],
            steps=settings["steps"],
            lora_steps=settings["lora_steps"],
            tokens=LENGTH * BATCH,
            test_tokens=LENGTH * TEST_ROWS,
            base=BASE_WEIGHT,
            dead=DEAD,
            claims=judged(loss_claims(runs)),
        )


def rows_of(sentences: EncodedSentences) -> Tensor:
    """Cuts a text into rows of LENGTH tokens, [N, LENGTH] int64; the last tokens are left out."""
    ids = sentences.stream[: len(sentences.stream) // LENGTH * LENGTH]
    return ids.long().view(-1, LENGTH)


def make_model(pieces: int) -> Any:
    """Creates the model, with torch's default generator."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**SIZES, vocab_size=pieces, use_cache=False)
    config._experts_implementation = "moe_ext"
    return Qwen3MoeForCausalLM(config)


def routers(model: Any) -> list[Tensor]:
    return [layer.mlp.gate.weight for layer in model.model.layers]


def learn(model: Any, rows: Tensor, steps: int, rate: float, loss: Loss, seed: int) -> None:
    """Trains the parameters that require gradients; the rate rises for a tenth of the steps."""
    from moe_ext.integrations.transformers import balance

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=rate, weight_decay=0.0, fused=True)
    warmup = max(1, steps // 10)
    schedule = LambdaLR(optimizer, lambda i: min((i + 1) / warmup, (steps - i) / (steps - warmup)))
    generator = torch.Generator().manual_seed(seed)
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = loss.pooled
    model.train()
    with balance(model, loss.layers) if loss.layers else nullcontext() as measured:
        for _ in progress(range(steps), f"training, seed {seed}", "steps"):
            ids = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
            loss_value = model(ids, labels=ids, output_router_logits=loss.pooled > 0).loss
            if measured is not None:
                loss_value = loss_value + measured.loss()
            optimizer.zero_grad()
            loss_value.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()


@torch.inference_mode()
def test(model: Any, rows: Tensor) -> dict[str, float]:
    """Measures the nats per token of a text, and the balance of the experts while they read it."""
    from moe_ext.integrations.transformers import balance

    nats = 0.0
    with evaluating(model), balance(model) as measured:
        for ids in rows.split(BATCH):
            nats += float(model(ids, labels=ids).loss) * len(ids)
    loads = torch.stack([layer.load / layer.load.double().mean() for layer in measured.layers])
    return {
        "nll": nats / len(rows),
        "idle": int((loads == 0).sum()),
        "dead": int((loads < DEAD).sum()),
        "busiest": float(loads.amax(1).mean()),
    }


def _cells(runs: ArmRuns, *keys: str) -> list[str]:
    """Formats the perplexity and the balance of the runs."""
    balance = [runs.mean(number_of(*keys, key)) for key in ("idle", "dead", "busiest")]
    ppl = runs.perplexity(number_of(*keys, "nll"))
    return [f"{ppl:.2f}", *(f"{value:.1f}" for value in balance)]


def _gap(runs: ArmRuns, a: str, b: str, key: str) -> PairedDifference | None:
    """Computes the difference of a number between two losses, over the seeds."""
    return runs.gap(number_of("tuned", a, key), number_of("tuned", b, key))


def loss_claims(runs: ArmRuns) -> list[Judged]:
    claims = []
    for key, what in (("nll", "perplexity"), ("dead", "number of dead experts")):
        for a, b in ((LAYERS, NONE), (POOLED, NONE), (LAYERS, POOLED)):
            gap = _gap(runs, a, b, key)
            shown = as_change(gap) if key == "nll" else f"{gap:+.1f}"
            claim = f"a balancing loss lowers the {what}"
            if b != NONE:
                claim = f"a loss of each layer lowers the {what} more than the pooled loss"
            claims.append(Judged(claim, f"{a} against {b}", gap, shown, verdict(gap)))
    return claims


def plot(runs: Sequence[Run]) -> Plot:
    """Plots the perplexity of each run over its number of dead experts."""
    figure, axes = new_axes(7, 4.2)
    for name in LOSSES:
        tuned = [run["tuned"][name] for run in runs]
        ppl = [perplexity(result["nll"]) for result in tuned]
        axes.plot([result["dead"] for result in tuned], ppl, "o", label=name)
    axes.set(xlabel="dead experts", ylabel="test perplexity on the new text")
    axes.grid(alpha=0.3)
    axes.legend(title="balancing loss")
    return Plot("perplexity and dead experts of each run", figure)


run = FineTuning.start
