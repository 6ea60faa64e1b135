"""The number of threads of a run on a CPU."""

import torch

# Several threads must be this many times as fast as one: they take more of the processor.
_WORTH = 1.2
_STEPS = 3  # of each number of threads


class ThreadChoice:
    """Tries one thread and all threads in the first steps of a run, then keeps the faster number.

    Small models may train faster with one thread. If other programs keep the processor busy, each
    operation of several threads waits for the slowest thread. The first step is not measured.
    `chosen` is the number of threads; None: not yet known.
    """

    def __init__(self) -> None:
        most = torch.get_num_threads()
        self.chosen = most if most == 1 else None
        self._rates: dict[int, list[float]] = {1: [], most: []}
        self._step = 0

    def begin_step(self) -> None:
        """Sets torch's number of threads for the next step."""
        if self.chosen is None:
            numbers = sorted(self._rates)
            torch.set_num_threads(numbers[self._step % len(numbers)])

    def end_step(self, words_per_second: float) -> str:
        """Notes the speed of a step; after the last one of the trial, returns a line, else ""."""
        if self.chosen is not None:
            return ""
        self._step += 1
        if self._step > 1:
            self._rates[torch.get_num_threads()].append(words_per_second)
        if min(map(len, self._rates.values())) < _STEPS:
            return ""
        best = {number: max(rates) for number, rates in self._rates.items()}
        most = max(best)
        self.chosen = most if best[most] >= _WORTH * best[1] else 1
        torch.set_num_threads(self.chosen)
        speeds = ", ".join(f"{rate:,.0f} with {number}" for number, rate in sorted(best.items()))
        return f"threads {self.chosen} of {most} (words/s: {speeds})"
