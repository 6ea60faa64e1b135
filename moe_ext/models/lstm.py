"""The LSTM layer of the language models (App. C.1; Sak et al. 2014 for the projection)."""

import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """One unidirectional LSTM over whole sentences, each from a zero state.

        i, f, j, o = W [x_t, m_{t-1}] + b          c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j)
        m_t = sigmoid(o) tanh(c_t), projected to `d_model` if `units` is larger

    Weights start uniform with variance 1 / fan_in (input and recurrent together), biases at zero,
    the forget gate's at 1 so that the cell remembers from the start.

    Args:
        d_model: D, the width of x and of what comes out.
        units: width of the cell; None or 0 is d_model.

    Raises:
        ValueError: units is below d_model.
    """

    def __init__(self, d_model: int, units: int | None = None) -> None:
        super().__init__()
        units = units or d_model
        if units < d_model:
            raise ValueError(f"LSTM: units must be at least d_model ({d_model}), got {units}")
        projection = d_model if units > d_model else 0
        self.lstm = nn.LSTM(d_model, units, proj_size=projection, batch_first=True)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        units, recurrent = self.lstm.hidden_size, self.lstm.proj_size or self.lstm.hidden_size
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("weight"):
                fan_in = units if name == "weight_hr_l0" else self.lstm.input_size + recurrent
                nn.init.uniform_(parameter, -((3 / fan_in) ** 0.5), (3 / fan_in) ** 0.5)
            else:
                nn.init.zeros_(parameter)
        # torch adds two biases, and orders the gates i, f, j, o.
        nn.init.ones_(self.lstm.get_parameter("bias_ih_l0")[units : 2 * units])

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] to m [B, S, D]. Sentences are padded on the right, where m means nothing."""
        return self.lstm(x)[0]
