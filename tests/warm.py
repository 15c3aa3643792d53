"""A `stagewright` that starts at once, for the hundred commands of the pages.

Most of what a short command takes is the start of Python and the imports of the package. One
process has them behind it and forks for each command, which then runs alone, in the folder, with
the environment, the input and the outputs of who asked: `installed` writes the executable that asks
it.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from helpers import ROOT

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "src"), "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"}

CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    request = json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]).encode()
    socket.send_fds(asked, [len(request).to_bytes(8, "big")], [0, 1, 2])
    asked.sendall(request)
    for handle in (0, 1, 2):
        os.close(handle)  # the command alone holds them: a pipe ends when the command does
    code = asked.recv(1)
sys.exit(code[0] if code else 1)
"""


@cache
def installed() -> Path:
    """The folder with the executable `stagewright`; the process behind it ends with this one."""
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = str(folder / "socket")
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    atexit.register(server.kill)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    client = folder / "stagewright"
    client.write_text(CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
    client.chmod(0o755)
    return folder


def _import_all() -> None:
    """Import every module of the package but those for which an extra is missing."""
    package = importlib.import_module("stagewright")
    for module in pkgutil.walk_packages(package.__path__, "stagewright."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:
                continue


def _answer(connection: socket.socket) -> int:
    """Run one command in this process, which was forked for it; its exit code."""
    size, handles, _, _ = socket.recv_fds(connection, 8, 3)
    request = b""
    while len(request) < int.from_bytes(size, "big"):
        request += connection.recv(1 << 16)
    folder, environment, arguments = json.loads(request)
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["stagewright", *arguments]
    try:
        importlib.import_module("stagewright.cli.main").main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _serve(address: str) -> None:
    _import_all()
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        children: set[int] = set()
        while True:
            connection, _ = listening.accept()
            if running := os.fork():
                connection.close()
                children.add(running)
                children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
                continue
            listening.close()
            code = _answer(connection)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.sendall(bytes([code]))
            os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
