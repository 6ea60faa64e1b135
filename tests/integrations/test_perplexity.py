"""The perplexity of a model."""

import importlib
import math

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft")

from exports import small  # noqa: E402
from tiny_models import logits_of, tiny, tokens  # noqa: E402

plug = importlib.import_module("moe_ext.integrations.transformers")


def test_perplexity(tmp_path):
    model = small("qwen3_moe")
    model.config.output_router_logits = True  # then the loss of transformers has the routers' too
    logits = logits_of(model).double().log_softmax(-1)[:, :-1]
    losses = -logits.gather(-1, tokens()[:, 1:, None])
    model.train()
    assert plug.perplexity(model, tokens()) == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert model.training
    for wrong in (tokens()[0], tokens()[:, :1], tokens()[:0]):
        with pytest.raises(ValueError, match="^perplexity: tokens must have the shape"):
            plug.perplexity(model, wrong)
    for wrong in (tokens().int(), tokens().tolist()):
        with pytest.raises(TypeError, match="^perplexity: tokens must"):
            plug.perplexity(model, wrong)


def test_perplexity_keeps_the_modes():
    model = tiny("qwen3_moe").train()
    model.model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    plug.perplexity(model, tokens())
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(IndexError):
        plug.perplexity(model, tokens() + 50)
    assert [module.training for module in model.modules()] == modes
