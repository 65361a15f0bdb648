# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the loader child: `loader_child.py SOCKET SPEC HOW`; publishes the minimal client's shard.

HOW: `good`, `slow:SECONDS`, `stall` (some progress, then none), `hang` (says nothing), `crash`, `kill`, `nothing`,
`tight` (has no memory while another shard is resident).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from daemons import commit, make, query

from wcache.model import Origin
from wcache.protocol.connection import Connection, connect
from wcache.protocol.messages import GetStatus, Granted, Message, Progress, ProgressInfo, PublishBegin, Resident, Status

GB = 1_000_000_000


def main() -> int:
    path, spec, how = sys.argv[1:4]
    text = sys.argv[4] if len(sys.argv) > 4 else "preload"
    print(f"loader: {how}", file=sys.stderr, flush=True)
    if how == "hang":
        signal.pause()
    if how == "nothing":
        return 0
    if how == "crash":
        print("ValueError: tensor lm_head.weight is cursed", file=sys.stderr)
        return 3
    with connect(Path(path), role="loader", name="loader") as connection:
        if how == "tight" and connection.ask(GetStatus(), Status).status.shards:
            print("segment 0 needs 9 bytes, 3 are free (out_of_memory)", file=sys.stderr)
            return 1
        asked = query(text)
        manifest, fds = make(asked, origin=Origin.PRELOAD, spec=spec)
        connection.send(PublishBegin(query=asked, origin=Origin.PRELOAD, bytes_total=10 * GB, spec=spec))
        reply, _ = connection._receive()
        if isinstance(reply, Resident):
            return 0
        assert isinstance(reply, Granted), reply
        work(connection, how)
        commit(connection, manifest, fds)
    return 0


def work(connection: Connection, how: str) -> None:
    if how.startswith("slow:"):
        seconds = float(how.removeprefix("slow:"))
        for step in range(int(seconds * 10)):
            connection.send(progress(int(step / seconds / 10 * 10 * GB)))
            time.sleep(0.1)
    if how in ("stall", "kill"):
        connection.send(progress(3 * GB))
        while True:
            connection.send(progress(3 * GB))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)


def progress(done: int) -> Message:
    info = ProgressInfo(
        phase="load", bytes_done=done, bytes_total=10 * GB, files_done=3, files_total=10, bytes_per_s=1.9e9
    )
    return Progress(progress=info)


if __name__ == "__main__":
    sys.exit(main())
