"""Length predictors: guesses of how many tokens a request will produce, for policies that want one."""

from __future__ import annotations

from mcjax.errors import ConfigError
from mcjax.types import Request, Scripts


def clip(guess: float, request: Request) -> int:
    """A whole number of tokens between 1 and what the request allows."""
    return max(1, min(round(guess), request.max_tokens))


class MaxTokens:
    """The request's own limit: never too low, often far too high."""

    name = "max_tokens"

    def predict(self, request: Request) -> int:
        return request.max_tokens

    def observe(self, request: Request, output_tokens: int) -> None:
        pass


class Constant:
    """The same guess for every request, within its limit."""

    name = "constant"

    def __init__(self, tokens: int):
        if tokens < 1:
            raise ConfigError("sched.lengths.tokens", tokens, "a predicted length must be 1 or more")
        self.tokens = tokens

    def predict(self, request: Request) -> int:
        return clip(self.tokens, request)

    def observe(self, request: Request, output_tokens: int) -> None:
        pass


class RunningMean:
    """The mean length of the tenant's finished requests; of everybody's while it has none; `max_tokens` at first."""

    name = "running_mean"

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, int]] = {}
        self._all = (0, 0)

    def observe(self, request: Request, output_tokens: int) -> None:
        """A request has finished with so many tokens. Sums are whole numbers: order leaves no rounding in them."""
        total, count = self._sums.get(request.tenant, (0, 0))
        self._sums[request.tenant] = (total + output_tokens, count + 1)
        self._all = (self._all[0] + output_tokens, self._all[1] + 1)

    def predict(self, request: Request) -> int:
        total, count = self._sums.get(request.tenant, self._all)
        return clip(total / count, request) if count else request.max_tokens


class Oracle:
    """The truth, from the scripts. Only for upper bounds: every table that used it names it."""

    name = "oracle"

    def __init__(self, scripts: Scripts):
        self._scripts = scripts

    def predict(self, request: Request) -> int:
        return clip(self._scripts.script(request.request_id).output_tokens, request)

    def observe(self, request: Request, output_tokens: int) -> None:
        pass
