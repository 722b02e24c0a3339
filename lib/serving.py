"""A server under load: prompts and answers on the same chips, or on chips of their own, in steady state.

A prefill fills the cache. The prompt's last token enters the first decode step, so a request of A tokens takes A steps in both
arrangements, and its first token is there after the first of them. Times are floors, as those of the passes."""

from dataclasses import dataclass, replace

from .breakdown import slowest, term
from .elementwise import NUMBERS, maximum, positive
from .forward import forward
from .models import kv_bytes
from .network import Switch, send
from .routing import whole
from .server import Server, fits, max_batch
from .workload import Workload

POLICIES = ("prefill first", "decode first", "chunked")
APART = "apart"
LINKS = ("dcn", "network")


@dataclass(frozen=True)
class Service:
    """A workload and the servers it is given to; `colocated` and `disaggregated` make one.

    `servers` are the numbers of prefill and decode servers, the same ones where `policy` is not "apart"; `budget` the tokens of a
    chunked pass; `slots` the most sequences that one server decodes together; `link` what carries caches; `streamed` whether
    they are sent layer by layer while later layers are computed."""

    prefill: Server
    decode: Server
    workload: Workload
    servers: tuple[int, int]
    policy: str
    budget: int | None = None
    slots: int | None = None
    link: str | Switch = "dcn"
    streamed: bool = False

    def __post_init__(self):
        _check_nouns(self)
        _check_arrangement(self)
        object.__setattr__(self, "slots", _slots(self))
        if (self.policy == "chunked") != (self.budget is not None) or self.budget is not None and self.budget <= self.slots:
            raise ValueError(f"chunked takes a budget of more tokens than its {self.slots} slots, the other policies none; "
                             f"got {self.budget!r} for {self.policy}")

    @property
    def lanes(self):
        """Prompts that a prefill server has under way at once: one in each stage of a pipeline and in each group."""
        return self.prefill.plan.pipeline * self.prefill.plan.groups if self.policy == APART else 1

    @property
    def chips(self):
        """All chips, those that prefill and those that decode."""
        prefills, decodes = self.servers
        return decodes * self.decode.plan.chips + (self.policy == APART) * prefills * self.prefill.plan.chips


def _check_nouns(service):
    for name, kind in (("prefill", Server), ("decode", Server), ("workload", Workload)):
        if not isinstance(getattr(service, name), kind):
            raise ValueError(f"{name} of a service is a {kind.__name__}, got {getattr(service, name)!r}")
    for server in (service.prefill, service.decode):
        if not isinstance(server.plan.tensor, NUMBERS):
            raise ValueError("a service has one plan a server, in numbers: tensor is neither an array nor a letter")
    if service.prefill.model != service.decode.model:
        names = f"{service.prefill.model.name} and {service.decode.model.name}"
        raise ValueError(f"prefill and decode servers hold one model, got {names}")


def _check_arrangement(service):
    if service.policy not in (*POLICIES, APART):
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {service.policy!r}")
    try:
        counts = tuple(positive("servers", whole("servers", count)) for count in service.servers)
    except TypeError:
        counts = ()
    if len(counts) != 2 or service.policy != APART and (len(set(counts)) > 1 or service.prefill != service.decode):
        raise ValueError(f"servers are two counts, of prefill and of decode servers, and the same ones where they are not apart; "
                         f"got {service.servers!r}")
    if service.streamed not in (True, False):
        raise ValueError(f"streamed is True or False, got {service.streamed!r}")
    if service.budget is not None:
        object.__setattr__(service, "budget", positive("budget", whole("budget", service.budget)))
    object.__setattr__(service, "servers", counts)
    if service.policy == APART:
        transfer(service, 1)                                # the link is known


def _slots(service):
    """The most sequences a decode server has places for: as many as are asked for, or as fit at full length."""
    work, (prompt, output) = service.workload, service.workload.longest
    if not fits(service.prefill, service.lanes, prompt) or not fits(service.decode, 1, prompt + output):
        raise ValueError(f"does not fit: beside the weights there is no room for a prompt of {prompt} tokens, or for a request "
                         f"of {prompt + output}")
    full = max(max_batch(service.decode, work.length), 1)
    if service.slots is None:
        return full if service.budget is None else max(min(full, service.budget - 1), 1)
    most, slots = max(max_batch(service.decode, work.context), full), positive("slots", whole("slots", service.slots))
    if slots > most:
        raise ValueError(f"does not fit: {slots} sequences of {work.context:.0f} tokens on average; slots is at most {most}")
    return slots


def colocated(server, workload, servers=1, policy="prefill first", budget=None, slots=None):
    """A Service whose servers read prompts and decode, each request on the server with the fewest prompts before it.

    policy: "prefill first" stops decoding while a prompt waits and a slot is free (interleaved); "decode first" lets a batch end
    before it reads the prompts that wait; "chunked" adds prompt tokens to each decode step, up to `budget` tokens in all. A whole
    prompt is read alone, by stage after stage of one group, while the others wait: several servers are better then.
    slots: as many as fit at full length if None, fewer than the budget; more of them, and sequences may lose their caches, which
    only the simulation knows. ValueError for another policy, a budget without chunks or not above the slots with them, and for
    what does not fit."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    return Service(server, server, workload, (servers, servers), policy, budget, slots)


def disaggregated(prefill, decode, workload, servers=(1, 1), link="dcn", slots=None, streamed=False):
    """A Service whose prompts are read on servers of their own, which send each cache to a decode server.

    prefill and decode: Servers of one model that may differ in chip, plan and formats; servers: how many of each. link: "dcn",
    "network" (one link of each chip, slices side by side in one domain of one kind of chip) or a Switch with a chip's egress.
    A pass reads one prompt; stages and groups of a prefill server have one each under way. ValueError for what does not fit, for
    another link, or where it is not known."""
    return Service(prefill, decode, workload, servers, APART, None, slots, link, streamed)


def transfer(service, prompt):
    """Seconds until the cache of a prompt has moved from a prefill to a decode server, with nothing else on its way.

    Every chip's part of the network cards carries a share; the server's own network, which is faster, spreads it to where it
    belongs. Bytes in the decode server's format. `parts` are the two ends; raises as `disaggregated`. Source: this book."""
    bytes = kv_bytes(service.decode.model, prompt, service.decode.precision.kv)
    ends = [(name, server.plan.chips, _network(service, server))
            for name, server in (("out", service.prefill), ("in", service.decode))]
    return slowest("transfer", *[replace(send(bytes / chips, network), name=name) for name, chips, network in ends])


def _network(service, server):
    link = service.link
    if isinstance(link, Switch):
        return link
    if link not in LINKS:
        raise ValueError(f"link must be {', '.join(LINKS)} or a Switch, got {link!r}")
    if link == "dcn":
        if server.chip.dcn is None:
            raise ValueError(f"no network between domains of {server.chip.name} is known: name another link, or give a Switch")
        return server.chip.dcn
    if service.prefill.chip != service.decode.chip or service.chips > server.chip.network.domain:
        raise ValueError(f"{service.prefill.chip.name} and {service.decode.chip.name} share no network of {service.chips} chips")
    return server.chip.network


def handover(service, prompt):
    """Seconds that a request waits for its cache to move: all of the transfer, or, streamed, what the prefill does not hide.

    Of L layers the last is sent when all is computed, the others meanwhile. Source: this book."""
    moved = transfer(service, prompt)
    return term("transfer", exposed(service, moved.value, read(service, prompt))) if service.streamed else moved


def exposed(service, sent, reading):
    """Of the seconds that a cache takes to send, those left when its prompt is read, which took `reading`: the last layer's, or
    what was not sent meanwhile."""
    layers = service.decode.model.layers
    return maximum(sent / layers, sent - reading * (layers - 1) / layers)


def read(service, prompt, kept=None):
    """Seconds in which a prompt is read in a pass of its own, but for the tokens `kept` of it, with every lane occupied.

    kept: the workload's share if None. With the logits of its last token, which a server may leave out."""
    kept = service.workload.kept(prompt) if kept is None else kept
    return forward(service.prefill, service.lanes, prompt - kept, kept).value
