"""The figures of the paper's language models, from Tables 1, 7 and 8, and App. C.1."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A model's row of Table 7 or 8, with figures as printed: one decimal digit.

    None stands for a figure that the paper does not state.
    """

    table: str  # "lm1b" (Table 7, 1 billion words) or "news" (Table 8, 100 billion words)
    name: str
    perplexity: float | None  # of the test part after 10 epochs (lm1b) or 0.1 epoch (news)
    final_perplexity: float | None  # after longer training (lm1b) or 1 epoch (news)
    ops: float  # multiply-adds for each timestep, in millions
    parameters: float  # weights without embedding and softmax, in millions
    total: float  # all weights, in billions
    drop_prob: float | None  # dropout probability
    tflops: float | None  # 10¹² floating-point operations per second on each GPU
    gpus: int | None  # the number of K40 GPUs
    hours: str  # of training; a range if the paper states it for several models together

    @property
    def config(self) -> str:
        return f"{self.table}/{self.name.lower()}"

    def __str__(self) -> str:
        when = ("10 epochs", "at the end") if self.table == "lm1b" else ("0.1 epoch", "1 epoch")
        values = self.perplexity, self.final_perplexity
        perplexity = ", ".join(
            f"{value} {'' if at.startswith('at') else 'after '}{at}"
            for value, at in zip(values, when, strict=True)
            if value
        )
        speed = f"; {self.tflops:.2f} TFLOPS/GPU on {self.gpus} K40s" if self.tflops else ""
        return (
            f"perplexity {perplexity}; {self.ops}M ops/timestep, {self.parameters}M parameters, "
            f"{self.total}B in all{speed}"
        )


# The first two rows and 2xLSTM-8192-1024 are models of Jozefowicz et al. (2016). They also trained
# LSTM-2048-512 (45.0 and 43.7, at 0.61 TFLOPS/GPU); its row here is the paper's own run.
# fmt: off
PUBLISHED = tuple(
    Published(*row)
    for row in (
        # perplexity twice, ops M, parameters M, total B, DropProb, TFLOPS/GPU, GPUs, hours
        ("lm1b", "LSTM-512-512",     None, 54.1,   2.4,      2.4,   0.8, 0.1,  None, None, ""),
        ("lm1b", "LSTM-1024-512",    None, 48.2,   4.7,      4.7,   0.8, 0.1,  None, None, ""),
        ("lm1b", "LSTM-2048-512",    44.7, None,   9.4,      9.4,   0.8, 0.1,  1.21, 16, "12-16"),
        ("lm1b", "4xLSTM-512",       46.0, None,   8.4,      8.4,   0.8, 0.1,  1.07, 16, "12-16"),
        ("lm1b", "MoE-1-Wide",       46.1, None,   8.4,      8.4,   0.8, 0.1,  1.29, 16, "12-16"),
        ("lm1b", "MoE-1-Deep",       45.7, None,   8.4,      8.4,   0.8, 0.1,  1.29, 16, "12-16"),
        ("lm1b", "MoE-4",            45.0, None,   8.4,      8.4,   0.8, 0.1,  0.52, 16, "18"),
        ("lm1b", "MoE-32",           39.7, None,   8.4,     37.8,   0.9, 0.1,  0.87, 16, "12-16"),
        ("lm1b", "MoE-256",          35.7, None,   8.6,    272.9,   1.1, 0.1,  0.81, 16, "12-16"),
        ("lm1b", "MoE-256-h",        36.0, None,   8.4,    272.9,   1.1, 0.1,  0.89, 16, "12-16"),
        ("lm1b", "MoE-1024-h",       34.6, None,   8.5,   1079.0,   1.9, 0.2,  0.90, 16, "12-16"),
        ("lm1b", "MoE-4096-h",       34.1, None,   8.9,   4303.4,   5.1, 0.2,  0.74, 16, "15"),
        ("lm1b", "2xLSTM-8192-1024", 34.7, 30.6, 151.0,    151.0,   1.8, 0.25, 1.09, 32, "59"),
        ("lm1b", "MoE-34M",          31.3, None,  33.8,   4313.9,   6.0, 0.3,  1.22, 32, "17"),
        ("lm1b", "MoE-143M",         28.0, None, 142.7,   4371.1,   6.0, 0.4,  1.56, 32, "47"),
        ("news", "4xLSTM-512",       54.5, 47.0,   8.4,      8.4,   0.1, None, 1.23, 32, ""),
        ("news", "MoE-32",           48.5, 40.4,   8.4,     37.8,   0.1, None, 0.83, 32, ""),
        ("news", "MoE-256-h",        42.8, 35.3,   8.4,    272.9,   0.4, None, 1.11, 32, ""),
        ("news", "MoE-1024-h",       40.3, 32.7,   8.5,   1079.0,   1.2, None, 1.14, 32, ""),
        ("news", "MoE-4096-h",       38.9, 30.9,   8.6,   4303.4,   4.4, None, 1.07, 32, ""),
        ("news", "MoE-16384-h",      38.2, 29.7,   8.8,  17201.0,  17.3, None, 0.96, 32, ""),
        ("news", "MoE-65536-h",      38.2, 28.9,   9.2,  68791.0,  68.9, None, 0.72, 64, ""),
        ("news", "MoE-131072-h",     39.8, 29.2,   9.7, 137577.6, 137.7, None, 0.30, 128, ""),
    )
)
# fmt: on

# Of Tables 2 to 5: the tables, the configuration, multiply-adds for a source and a target word, in
# millions, and all weights, in billions.
PUBLISHED_TRANSLATION = (
    ("Tables 2 to 4", "mt/wmt14-en-fr-2048-h", 85, 8.7),
    ("Table 5", "mt/multilingual", 102, 8.7),
)
