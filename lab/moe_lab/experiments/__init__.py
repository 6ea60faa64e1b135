"""Experiments: runs of several configurations and seeds, their results, intervals and pages.

- arms: the models of a study with their settings, and the options ``--seeds`` and ``--arms``
- single_run: trains and tests a model
- store: the JSON file of the finished runs
- runs: means, paired differences, curves and commands of stored runs
- claims, trials: the verdicts of a page, and its table of other learning rates and dropouts
- page: pages of results, and their files
- study: the base classes of all studies, which put these parts together
- comparison: the study of ``moe-lab compare``

The studies of the paper are in `moe_lab.studies`.
"""

__all__: list[str] = []
