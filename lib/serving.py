"""A server under load: prompts and answers on the same chips, or on chips of their own, in steady state.

A prefill fills the cache. The prompt's last token enters the first decode step, so a request of G tokens takes G steps in both
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
        for name, kind in (("prefill", Server), ("decode", Server), ("workload", Workload)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} of a service is a {kind.__name__}, got {getattr(self, name)!r}")
        for server in (self.prefill, self.decode):
            if not isinstance(server.plan.tensor, NUMBERS):
                raise ValueError("a service has one plan a server, tensor cannot be an array")
        if self.prefill.model != self.decode.model:
            names = f"{self.prefill.model.name} and {self.decode.model.name}"
            raise ValueError(f"prefill and decode servers hold one model, got {names}")
        most = max_batch(self.decode, self.workload.length)
        if most < 1 or not fits(self.prefill, self.lanes, max(self.workload.prompt.counts)):
            raise ValueError(f"does not fit: beside the weights there is no room for a prompt of "
                             f"{max(self.workload.prompt.counts)} tokens, or for a request of {self.workload.length:.0f}")
        slots = most if self.slots is None else positive("slots", whole("slots", self.slots))
        most = max(max_batch(self.decode, self.workload.context), most)
        if slots > most:
            raise ValueError(f"does not fit: {slots} sequences of {self.workload.context:.0f} tokens on average; "
                             f"slots is at most {most}")
        object.__setattr__(self, "slots", slots)

    @property
    def lanes(self):
        """Prompts that a prefill server has under way at once: one in each stage of a pipeline and in each group."""
        return self.prefill.plan.pipeline * self.prefill.plan.groups if self.policy == APART else 1

    @property
    def chips(self):
        """All chips, those that prefill and those that decode."""
        prefills, decodes = self.servers
        return decodes * self.decode.plan.chips + (self.policy == APART) * prefills * self.prefill.plan.chips


def colocated(server, workload, servers=1, policy="prefill first", budget=None, slots=None):
    """A Service whose servers read prompts and decode, request after request on the server with the fewest.

    policy: "prefill first" stops decoding while a prompt waits and a slot is free (interleaved); "decode first" lets a batch end
    before it reads the prompts that wait; "chunked" adds prompt tokens to each decode step, up to `budget` tokens in all.
    slots: as many as fit at full length if None. ValueError for another policy, a budget without chunks, or not above the
    slots with them, and for what does not fit."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    servers = positive("servers", whole("servers", servers))
    service = Service(server, server, workload, (servers, servers), policy, budget, slots)
    if (policy == "chunked") != (budget is not None) or budget is not None and whole("budget", budget) <= service.slots:
        raise ValueError(f"chunked takes a budget of more tokens than its {service.slots} slots, the other policies none; "
                         f"got {budget!r} for {policy}")
    return service


def disaggregated(prefill, decode, workload, servers=(1, 1), link="dcn", slots=None, streamed=False):
    """A Service whose prompts are read on servers of their own, which send each cache to a decode server.

    prefill and decode: Servers of one model that may differ in chip, plan and formats; servers: how many of each. link: "dcn",
    "network" (one link of each chip, slices side by side in one domain of one kind of chip) or a Switch with a chip's egress.
    A pass reads one prompt; stages and groups of a prefill server have one each under way. ValueError for what does not fit, for
    another link, or where it is not known."""
    try:
        counts = tuple(positive("servers", whole("servers", count)) for count in servers)
    except TypeError:
        counts = ()
    if len(counts) != 2 or streamed not in (True, False):
        raise ValueError(f"servers are two counts, of prefill and decode servers, and streamed is True or False; "
                         f"got {servers!r}, {streamed!r}")
    service = Service(prefill, decode, workload, counts, APART, None, slots, link, streamed)
    transfer(service, max(workload.prompt.counts))
    return service


def transfer(service, prompt):
    """Seconds until the cache of a prompt has moved from a prefill to a decode server: every chip of each takes its share.

    The bytes are those of the decode server's format. `parts` are the two ends; raises as `disaggregated`."""
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
    chips = service.prefill.plan.chips + service.decode.plan.chips
    if service.prefill.chip != service.decode.chip or chips > server.chip.network.domain:
        raise ValueError(f"{service.prefill.chip.name} and {service.decode.chip.name} share no network of {chips} chips")
    return server.chip.network


def handover(service, prompt):
    """Seconds that a request waits for its cache to move: all of the transfer, or, streamed, what the prefill does not hide.

    Of L layers the last is sent when all is computed, the others meanwhile. Source: this book."""
    moved = transfer(service, prompt)
    if not service.streamed:
        return moved
    layers = service.decode.model.layers
    hidden = read(service, prompt) * (layers - 1) / layers
    return term("transfer", maximum(moved.value / layers, moved.value - hidden))


def read(service, prompt):
    """Seconds in which a prompt is read in a pass of its own, but for what is cached of it, with every lane occupied."""
    kept = service.workload.kept(prompt)
    return forward(service.prefill, service.lanes, prompt - kept, kept).value
