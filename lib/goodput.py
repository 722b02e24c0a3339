"""What a service is worth: requests served within promises, tokens per chip, tokens per dollar.

Every chip counts, those that only read prompts too."""

from dataclasses import replace

from .breakdown import term, total
from .elementwise import positive
from .queueing import checked_share
from .serving import APART
from .steady import capacity, check_load, tpot, ttft
from .units import show


def at_rate(service, rate):
    """The same service with so many requests a second."""
    return replace(service, workload=replace(service.workload, rate=rate))


def goodput(service, first, each, share=0.9):
    """The most requests per second of which a `share` has its first token within `first` seconds, and a `share` waits `each`
    seconds at most for a further one on average over its answer. 0, with a note, where a promise cannot be kept at any rate.

    Both are compared in closed form (`ttft`, `tpot`); where one binds, nearly all keep the other. Raises as they do.
    Source: the goodput of DistServe (Zhong et al. 2024), in steady state."""
    first, each, most = positive("first", first), positive("each", each), capacity(service).value
    checked_share(share)

    def kept(rate):
        loaded = at_rate(service, rate)
        return ttft(loaded, share).value <= first and tpot(loaded, share).value <= each
    low, high = most * 2**-20, most * (1 - 2**-20)
    if not kept(low):
        alone, further = (show(f(at_rate(service, low)).value, "s") for f in (ttft, tpot))
        return replace(term("goodput", 0.0, "req/s"), note=f"not at any rate: alone, a request has its first token after {alone} "
                                                           f"and a further one every {further}")
    if kept(high):
        return term("goodput", high, "req/s")
    while high - low > most * 2**-14:
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return term("goodput", low, "req/s")


def per_chip(service):
    """Output tokens per second and chip at the workload's rate: all chips of both pools. ValueError for a load of 1 or more."""
    check_load(service)
    return term("per chip", _tokens(service) / service.chips, "tok/s")


def cost(service, prices=()):
    """USD per output token at the workload's rate, by pool. prices: {chip name: USD per second} that differ from `Chip.price`.

    ValueError for a chip without a price (`break_even_price` turns the question round), and for a load of 1 or more."""
    prices = dict(prices)
    check_load(service)
    parts = []
    for name, count, chip in _pools(service):
        price = prices.get(chip.name, chip.price)
        if price is None:
            raise ValueError(f"no price is known of {chip.name}: give prices={{'{chip.name}': USD per second}}, or ask "
                             f"break_even_price")
        parts.append(term(name, count * positive("price", price) / _tokens(service), "USD/tok"))
    return total("cost", *parts)


def break_even_price(service, each, prices=()):
    """USD per second at which chips without a known price make a token cost `each` USD, as another service's does.

    Raises as `cost`, and ValueError where all prices are known, or those that are known cost more already."""
    prices, known, unknown = dict(prices), 0.0, 0
    check_load(service)
    for _, count, chip in _pools(service):
        price = prices.get(chip.name, chip.price)
        known, unknown = (known, unknown + count) if price is None else (known + count * positive("price", price), unknown)
    left = positive("each", each) * _tokens(service) - known
    if not unknown or left <= 0:
        raise ValueError("every price is known: ask cost" if not unknown else
                         f"the chips whose price is known cost {known / _tokens(service):.3g} USD a token already")
    return term("price", left / unknown, "USD/s")


def _pools(service):
    prefills, decodes = service.servers
    pools = [("decode chips", decodes * service.decode.plan.chips, service.decode.chip)]
    if service.policy == APART:
        pools.insert(0, ("prefill chips", prefills * service.prefill.plan.chips, service.prefill.chip))
    return pools


def _tokens(service):
    return service.workload.rate * service.workload.output.mean()
