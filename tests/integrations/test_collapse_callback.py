"""The callback that warns before a router collapses."""

import warnings

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from tiny_models import tiny, tokens, trainer  # noqa: E402

from moe_ext.integrations.transformers import CollapseCallback, balance, experts_modules  # noqa: E402

NAME = "CollapseCallback: model.layers.1.mlp.experts"


def collapsed():
    """Returns a model with 6 experts, k = 2, whose second router selects two of them by ties."""
    model = tiny("mixtral")
    torch.nn.init.zeros_(model.model.layers[1].mlp.gate.weight)
    return model


def trained(model, folder, callback, num_rows=32, **options):
    """Trains three steps without a change of the weights; returns the warnings of the callback."""
    options = {"max_steps": 3, "learning_rate": 0.0} | options
    options["per_device_train_batch_size"] = num_rows
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(model, folder, num_rows, [callback], **options).train()
    texts = [str(w.message) for w in caught]
    return [text for text in texts if text.startswith("CollapseCallback: ")]


def test_a_balanced_model_has_no_warning(tmp_path):
    model = tiny("mixtral")
    assert trained(model, tmp_path, CollapseCallback()) == []
    assert not any(module._forward_pre_hooks for module in experts_modules(model).values())


def test_warnings_name_layer_rule_and_values(tmp_path):
    model = collapsed()
    with torch.no_grad(), balance(model) as measured:
        model(tokens())
    busiest = int(measured.layers[1].load.argmax())
    messages = trained(model, tmp_path, CollapseCallback(), max_steps=2)
    share = f"the share of the busiest expert must be at most 0.667, got 1.00 (expert {busiest})"
    dead = "the fraction of dead experts must be at most 0.25, got 0.67 (4 of 6)"
    assert messages == [
        f"{NAME}: {text}; step {step}"
        for step in (1, 2)
        for text in (
            f"{share}; 4 of 6 experts are dead",
            f"{dead}; the busiest expert, {busiest}, has a share of 1.00",
        )
    ]


@pytest.mark.parametrize(
    ("limits", "number"), [({"max_share": 1.0}, 3), ({"max_dead": 0.7}, 3), ({"max_share": 0.3}, 9)]
)
def test_limits(limits, number, tmp_path):
    """With a limit below k / E, a balanced layer has a warning too."""
    assert len(trained(collapsed(), tmp_path, CollapseCallback(**limits))) == number


def test_few_tokens_are_collected(tmp_path):
    """A step has 36 tokens with 2 experts each; a check needs 192."""
    messages = trained(collapsed(), tmp_path, CollapseCallback(), num_rows=4)
    assert [text.rpartition("; ")[2] for text in messages] == ["step 3", "step 3"]


def test_an_evaluation_does_not_count(tmp_path):
    options = {"num_rows": 4, "eval_strategy": "steps", "eval_steps": 1}
    assert trained(collapsed(), tmp_path, CollapseCallback(), **options) == []


def test_a_second_training_measures_again(tmp_path):
    model, callback = collapsed(), CollapseCallback()
    callback.on_train_begin(None, None, None, model=model)  # as before an error in the training
    assert len(trained(model, tmp_path, callback)) == 6
    assert callback.measured is None
    assert not any(module._forward_pre_hooks for module in experts_modules(model).values())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_share": 1.5}, "max_share must be at most 1, got 1.5"),
        ({"max_share": -0.1}, "max_share must be at least 0, got -0.1"),
        ({"max_dead": 2}, "max_dead must be at most 1, got 2"),
    ],
)
def test_limits_must_be_fractions(limits, message):
    with pytest.raises(ValueError, match=f"CollapseCallback: {message}"):
        CollapseCallback(**limits)
