"""Two processes on this machine: one reads prompts, the other pulls their KV caches over loopback and decodes.

They meet through `jax.distributed`; caches go through `jax.experimental.transfer`, whose waits have no end of their own (the
timeout of a pull changes nothing in jax 0.10.2, and SIGTERM is taken as a notice only). So each process ends itself when its
time is over, and is killed if it does not. `python -m lib.demos.handover` is what the two run.
"""

import faulthandler
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils, transfer

from lib.demos import machine, replica, trained
from lib.demos.engine import Request, Slots
from lib.elementwise import positive

HOST = "127.0.0.1"
ROLES = ("prefill", "decode")
ALONE = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


@dataclass(frozen=True)
class Handover:
    """Tokens by request, the bytes that were pulled, and the seconds of each pull, of which the first opens the connection."""

    tokens: tuple
    bytes: int
    seconds: tuple


def two_processes(model, requests, limit=60.0, **sizes):
    """Serve requests with a model of `lib.demos.trained` in two processes of one CPU device each: a `Handover`.

    limit: seconds for all of it; sizes: of `replica.place`. Raises ValueError as `Slots` does, RuntimeError with the last words
    of a process that failed, TimeoutError when the time is over. No process outlives the call.
    """
    positive("limit", limit)
    if not requests:
        raise ValueError("a handover needs a request")
    Slots(_replica(model, sizes), requests)
    job = {"model": model, "requests": [asdict(each) for each in requests], "sizes": sizes, "limit": limit, "port": _free_port()}
    answer = json.loads(_together([[sys.executable, "-m", "lib.demos.handover", role, json.dumps(job)] for role in ROLES], limit))
    return Handover(tuple(map(tuple, answer["tokens"])), answer["bytes"], tuple(answer["seconds"]))


def _together(commands, limit):
    """Run commands at the same time until all have ended: the last line that the last one of them wrote."""
    over, proxies = time.monotonic() + limit, ("http_proxy", "https_proxy", "no_proxy")  # gRPC would ask one for loopback too
    environment = {name: value for name, value in os.environ.items() if name.lower() not in proxies} | ALONE
    with ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in commands]
        running = [subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=errors)
                   for command, (said, errors) in zip(commands, files, strict=True)]
        try:
            while None in (codes := [each.poll() for each in running]) and not any(codes) and time.monotonic() < over:
                time.sleep(0.02)
        finally:
            for each in running:
                each.kill()
                each.wait()
        if any(codes):
            failed = [_text(errors)[-2000:] for code, (_, errors) in zip(codes, files, strict=True) if code]
            raise RuntimeError(f"a process of the handover failed: {' '.join(failed)}")
        if None in codes:
            raise TimeoutError(f"the handover was not over after {limit} s, so both processes were ended")
        return _text(files[-1][0]).splitlines()[-1]


def _text(file):
    file.seek(0)
    return file.read().decode(errors="replace")


def _free_port():
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]


def _replica(model, sizes):
    return replica.place(*trained.load(model), jax.local_devices()[:1], **sizes)


def _prefill(reader, served):
    """Offer the cache of every prompt, then wait until the other process has what it wants."""
    server = _server()
    for i, request in enumerate(served):
        server.await_pull(i, jax.tree.leaves(jax.block_until_ready(replica.prefill(reader, request.prompt))))
    _told(server.address())
    _told("")


def _decode(decoder, served):
    """Pull a cache whenever a slot is free, make a step otherwise."""
    slots, connection = Slots(decoder, served), _server().connect(_told())
    cache = jax.eval_shape(lambda: replica.prefill(decoder, served[0].prompt))
    cut = decoder.cut(replica.ONE)
    wanted = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=cut) for each in jax.tree.leaves(cache)]
    pulled, seconds = 0, []
    while len(seconds) < len(served) or slots.holders:
        if len(seconds) < len(served) and slots.freed:
            elapsed, leaves = machine.timed(connection.pull, len(seconds), wanted)
            slots.prefilled.append((len(seconds), jax.tree.unflatten(jax.tree.structure(cache), leaves)))
            slots.seat(0.0)
            pulled += sum(each.nbytes for each in leaves)
            seconds.append(elapsed)
        else:
            slots.step("decode", 0.0, 0.0)
    _told()
    print(json.dumps({"tokens": slots.made, "bytes": pulled, "seconds": seconds}))


def _server():
    return transfer.start_transfer_server(jax.local_devices()[0].client, f"{HOST}:0", [f"{HOST}:0"])


def _told(text=""):
    """What the first process says to both, at most 64 characters; each waits for the other here."""
    sent = np.frombuffer(text.encode().ljust(64), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent))).decode().rstrip()


def _main(role, job):
    faulthandler.dump_traceback_later(job["limit"], exit=True)
    try:
        jax.distributed.initialize(f"{HOST}:{job['port']}", len(ROLES), ROLES.index(role), initialization_timeout=30)
        requests = [Request(**each) for each in job["requests"]]
        {"prefill": _prefill, "decode": _decode}[role](_replica(job["model"], job["sizes"]), requests)
    except BaseException:  # an orderly exit would wait for the other process, which waits for this one
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
