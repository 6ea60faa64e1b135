"""The paper's experiments: a table of their command lines, and one module for each study.

``moe-lab study NAME`` runs a study. `entries` parses its arguments, without torch, then calls the
function `run` of its module. The text of its page is in a Markdown file of the same name.

- `balanced`: strictly balanced gates in training (App. F).
- `capacity`: more experts at equal operations (Figs. 2 and 3, Table 7).
- `efficiency`: the training speed of sparse and of dense models (Sec. 5.1).
- `facts`: how many bits of facts a layer stores with its parameters (Sec. 1).
- `fine_tuning`: balancing losses while adapters of a model of transformers learn another text.
- `kneser_ney`: the n-gram baseline (App. C.1).
- `lora`: adapters of packed experts on another corpus.
- `losses`: values of w_importance and w_load (Table 6).
- `multilingual`: one model for several language pairs (Table 5).
- `paper_tables`: the size and the cost of every model (Tables 7 and 8).
- `routers`: the paper's router and later ones.
- `specialisation`: the words and contexts that experts specialise in (Table 9).
- `translation`: mixtures of experts in a translation model (Fig. 4).
"""

__all__: list[str] = []
