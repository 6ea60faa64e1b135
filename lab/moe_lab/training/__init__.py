"""Training of the models: configuration, loop, metrics, checkpoints.

- config: the options of a run, from TOML and dotted keys
- text, model, optimizers: what a configuration describes
- device, threads, launch: set-up of torch, and the process group of torchrun
- loop: the training loop of all models
- folder, logging, checkpoint: what a run writes, and its trained model
- metrics: perplexity and balance
- translation: the translator of a trained model

An example::

    from moe_lab.training.checkpoint import load_run
    from moe_lab.training.config import read_config
    from moe_lab.training.loop import make_trainer
    from moe_lab.training.metrics import evaluate
    from moe_lab.training.text import load_part

    config = read_config("small/moe-32", ["steps=500"])
    trainer = make_trainer(config)
    trainer.run()
    trained = load_run(config.output)
    test = evaluate(trained.model, load_part(config.data, trained.vocabulary, "test"))
    print(test.perplexity)
"""

__all__: list[str] = []
