"""Which experts a model chooses: note a run's choices, and let another run follow them.

Experts are chosen by `topk` of scores. Where two scores are nearer to each other than the
roundings that two runs differ in, the runs may choose differently, and rightly so; from there
on the token is computed from other weights, and its logits can't be compared any more. So the
choices are compared by themselves, and the logits between runs of the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_TOPK: Final = (torch.topk, torch.Tensor.topk)


class Noted(TorchFunctionMode):
    """Within it, keep what each `topk` chooses; Dynamo traces it, so compiled models do too.

    Attributes:
        choices: The indices, [tokens, k], a tensor for each call, in the calls' order.
    """

    def __init__(self) -> None:
        """Have noted nothing."""
        super().__init__()
        self.choices: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function; of `topk` keep the indices."""
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.choices.append(result[1])
        return result


class Followed(TorchFunctionMode):
    """Within it, each `topk` chooses what it is told to, and yields the scores it has of that.

    Attributes:
        differing: How many rows (tokens) of all calls would have been chosen otherwise.
        shortfall: By how much the best score that was left out exceeds the least that was chosen,
            in units of the spread of all of the call's scores (the choice depends on their
            differences alone); the largest of all rows, 0.0 if none does.
    """

    def __init__(self, choices: Sequence[torch.Tensor]) -> None:
        """Take what `Noted` has kept of another run."""
        super().__init__()
        self.differing = 0
        self.shortfall = 0.0
        self._left = list(choices)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, or for `topk` choose as told."""
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        assert self._left, "the other run chose less often"
        scores, own, told = args[0], result[1], self._left.pop(0)
        assert told.shape == own.shape, "the other run's choice has another shape"
        told_apart = told.sort(-1).values
        assert bool((told_apart.diff(dim=-1) > 0).all()), "an index is chosen twice"
        self.differing += int((told_apart != own.sort(-1).values).any(-1).sum())
        values = scores.gather(-1, told)
        left_out = scores.scatter(-1, told, -torch.inf).amax(-1)
        # scores of -inf are of experts that are out of the question
        finite = scores[scores.isfinite()].double()
        spread = (finite.max() - finite.min()).clamp(min=torch.finfo(torch.double).tiny)
        worst = (left_out.double() - values.amin(-1).double()) / spread
        worst = worst.nan_to_num(nan=0.0, posinf=torch.inf)  # nan: both are -inf
        self.shortfall = max(self.shortfall, float(worst.max()))
        return torch.return_types.topk((values, told))

    def finish(self) -> None:
        """Raise AssertionError if the run chose less often than the one it followed."""
        assert not self._left, "the other run chose more often"
