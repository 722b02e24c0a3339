"""What a simulation leaves: a row for each request, a row for each pass, and what they say together."""

from dataclasses import dataclass

from .elementwise import positive
from .queueing import checked_share

ROW = [("arrival", float), ("prompt", int), ("output", int), ("start", float), ("prefilled", float), ("moved", float),
       ("first", float), ("end", float), ("server", int), ("preemptions", int)]
STEP = [("server", int), ("start", float), ("end", float), ("decoding", int), ("read", int), ("pages", int)]
MEASURES = ("ttft", "tpot", "latency", "wait")


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """Requests and passes of one simulation.

    `rows`: a structured array, one entry a request in the order of arrival: seconds at which it came, its (last) reading began
    and ended, its cache had moved, its first and its last token were there; the decode server; how often it lost its cache.
    `steps`: one entry a pass, in the order of their ends: the server (decode servers first, then lanes of prefill servers), start
    and end, sequences that gained a token, prompt tokens that were read, pages in use when it began. `pages` is what a decode
    server has of them, `present` the mean number of requests in the system, counted as they came and went."""

    rows: object
    steps: object
    pages: int
    present: float

    def __repr__(self):
        return f"run: {len(self.rows):,} requests, {len(self.steps):,} passes, {self.seconds:,.1f} s"

    @property
    def seconds(self):
        """From time 0 to the last token."""
        return float(self.rows["end"].max())

    def of(self, measure):
        """Seconds of each request: "ttft" to its first token, "tpot" from token to token after it (requests of one token have
        none and are left out), "latency" to its last, "wait" until its (last) reading begins. ValueError for another name."""
        rows = self.rows
        if measure == "tpot":
            rows = rows[rows["output"] > 1]
            if not len(rows):
                raise ValueError("answers of one token have no time from token to token")
            return (rows["end"] - rows["first"]) / (rows["output"] - 1)
        if measure not in MEASURES:
            raise ValueError(f"a run measures {', '.join(MEASURES)}, got {measure!r}")
        return rows[{"ttft": "first", "latency": "end", "wait": "start"}[measure]] - rows["arrival"]

    def percentile(self, measure, share):
        """Seconds that a `share` of the requests, above 0 and below 1, stays within."""
        from numpy import quantile
        return float(quantile(self.of(measure), checked_share(share)))

    def attained(self, ttft, tpot):
        """The share of requests that have their first token within `ttft` and the mean one after it within `tpot` seconds."""
        rows = self.rows
        gaps = (rows["end"] - rows["first"]) <= positive("tpot", tpot) * (rows["output"] - 1) * (1 + 2**-40)
        return float((gaps & (self.of("ttft") <= positive("ttft", ttft))).mean())

    @property
    def batch(self):
        """Mean sequences of a pass that decodes, each pass weighing its seconds."""
        steps = self.steps[self.steps["decoding"] > 0]
        seconds = steps["end"] - steps["start"]
        return float((steps["decoding"] * seconds).sum() / seconds.sum())

    def busy(self, server):
        """The part of the time, from the first arrival to the last token, in which a server works. ValueError without a pass."""
        steps = self.steps[self.steps["server"] == server]
        if not len(steps):
            raise ValueError(f"no pass of server {server}; there are passes of {sorted(set(self.steps['server'].tolist()))}")
        return float((steps["end"] - steps["start"]).sum() / (self.seconds - self.rows["arrival"][0]))

    @property
    def throughput(self):
        """Output tokens per second, from the first arrival to the last token."""
        return float(self.rows["output"].sum() / (self.seconds - self.rows["arrival"][0]))

    def gap(self, share):
        """Seconds that a `share` of all tokens but the first ones comes within, after the token before (inter-token latency).

        A number or an array of shares. ValueError for one not above 0 and below 1, for answers of one token, and where a sequence
        lost its cache between two tokens."""
        import numpy
        share = checked_share(share)
        if self.rows["preemptions"].any():
            raise ValueError("gaps between tokens are known only where no sequence lost its cache")
        seconds, waited = [], []
        for server in numpy.unique(self.rows["server"]):
            steps = self.steps[(self.steps["server"] == server) & (self.steps["decoding"] > 0)]
            first = numpy.sort(self.rows["first"][self.rows["server"] == server])
            begun = numpy.searchsorted(first, steps["end"], "right") - numpy.searchsorted(first, steps["end"])
            seconds.append(numpy.diff(steps["end"]))
            waited.append((steps["decoding"] - begun)[1:])
        seconds, waited = numpy.concatenate(seconds), numpy.concatenate(waited)
        if not waited.sum():
            raise ValueError("answers of one token have no gaps between tokens")
        order = seconds.argsort()
        reached = waited[order].cumsum()
        return seconds[order][numpy.searchsorted(reached, share * reached[-1])]
