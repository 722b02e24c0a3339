"""How long requests wait for servers that serve one at a time: what queueing theory knows in closed form.

Requests arrive independently of each other (Poisson) and are served in their order. `service` is the mean seconds of one,
`variation` its standard deviation over its mean: 1 for exponential times (M/M/c), 0 for equal ones (M/D/c)."""

from math import log

from .breakdown import term
from .elementwise import positive
from .routing import whole


def stable(load, what=""):
    """`load`, the work that arrives over what can be done, if it is below 1. ValueError saying how unstable it is otherwise."""
    most = load.max() if getattr(load, "shape", ()) else load
    if not hasattr(load, "free_symbols") and most >= 1:
        text = f"{most:,.0f}" if most >= 10 else f"{most:.{2 if most > 1.05 else 4}g}"
        raise ValueError(f"unstable: load {text} of capacity{what}: the queue grows without end")
    return load


def wait_chance(rate, service, servers=1):
    """The chance that all of `servers` are busy when a request comes: Erlang's C, exact for exponential times; the load for one.

    ValueError for a load of 1 or more."""
    servers, service = positive("servers", whole("servers", servers)), positive("service", service)
    erlangs = positive("rate", rate) * service
    load, blocked = stable(erlangs / servers), 1.0
    for k in range(1, servers + 1):                         # Erlang's B, server by server
        blocked = erlangs * blocked / (k + erlangs * blocked)
    return blocked / (1 - load * (1 - blocked))


def wait(rate, service, servers=1, variation=1.0):
    """Mean seconds a request waits before it is served.

    Exact for one server, whatever the times' distribution (Pollaczek and Khinchine), and for exponential times; for more servers
    and other times the exponential wait times (1 + variation^2) / 2 (Allen and Cunneen), a few per cent off at high loads.
    Numbers or arrays. ValueError for a load of 1 or more."""
    rate, service, variation = positive("rate", rate), positive("service", service), positive("variation", variation, zero=True)
    late = wait_chance(rate, service, servers)
    return term("wait", late * service / (servers - rate * service) * (1 + variation**2) / 2)


def wait_quantile(share, rate, service, servers=1, variation=1.0):
    """Seconds that a `share` of requests waits at most.

    Those that wait at all are taken to wait exponentially long: exact for exponential times, close for others at high loads.
    Numbers. ValueError unless 0 < share < 1, and for a load of 1 or more."""
    late, mean = wait_chance(rate, service, servers), wait(rate, service, servers, variation).value
    return term("wait", mean * tail(late, share))


def checked_share(share):
    """`share`, a number or an array, if it is above 0 and below 1. ValueError otherwise."""
    share = positive("share", share)
    positive("1 - share", 1 - share)
    return share


def tail(late, share):
    """How many times the mean wait a `share` of requests waits at most, if a part `late` of them waits, exponentially long."""
    share = checked_share(share)
    return log(late / (1 - share)) / late if late > 1 - share else 0.0


def crowd(rate, completions):
    """The chances of 0, 1, 2, ... requests in a station that completes completions[n-1] a second while it holds n of them.

    Up to the last number every request is served at once, sharing the station equally: then the chances are the same for all
    lengths with one mean. Beyond it they queue. Returns (chances of 0 to N present, mean number that queues).
    ValueError where the station cannot keep up. Source: the birth-death chain of a processor-sharing queue."""
    weights = [1.0]
    for speed in completions:
        weights.append(weights[-1] * positive("rate", rate) / positive("a completion rate", speed))
        if weights[-1] > 2.0**900:
            weights = [w * 2.0**-900 for w in weights]
    again = stable(rate / completions[-1])
    queue = weights[-1] * again / (1 - again)               # those with more than N: each full, one more waits
    every = sum(weights) + queue
    chances = [w / every for w in weights]
    chances[-1] += queue / every
    return chances, queue / every / (1 - again)
