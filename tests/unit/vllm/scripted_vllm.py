#!/usr/bin/env python
"""Replaces a Python with vLLM: takes the command line of vLLM's server and runs a scripted one. Starts in a second."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.unit.vllm.scripted_server import ScriptedServer


def main(port: int) -> None:
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    server = ScriptedServer(version="default", port=port, listens=False)
    server.exits_on_generate = "--exits-on-generate" in sys.argv
    sign = Path(sys.argv[sys.argv.index("--hangs-if") + 1]) if "--hangs-if" in sys.argv else None
    hangs = sign is not None and sign.exists()
    if hangs:
        server.delays["/collective_rpc"] = 600.0
    server.listen()
    while hangs and "/collective_rpc" not in server.calls:
        time.sleep(0.02)
    if sign and hangs:
        sign.with_suffix(".reached").touch()
    signal.pause()


if __name__ == "__main__":
    if "--cannot-start" in sys.argv:
        sys.exit("ValueError: there is no such model")
    main(int(sys.argv[sys.argv.index("--port") + 1]))
