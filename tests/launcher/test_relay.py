"""What a worker passes on between a script and the launcher."""

from __future__ import annotations

import json
import os
import socket

from whale.launcher.protocol import FrameKind, Unpacker
from whale.launcher.worker_io import Relay

ROUNDS = 300


def _say_and_print(control: socket.socket, stdout: int) -> None:
    for number in range(ROUNDS):
        control.sendall(json.dumps({"start": str(number)}).encode() + b"\n")
        os.write(stdout, b"%d\n" % number)


def test_what_a_script_says_of_itself_is_known_before_what_it_prints_next() -> None:
    launcher, connection = socket.socketpair()
    worker = os.fork()
    if not worker:
        launcher.close()
        pipes = [os.pipe() for _ in range(3)]
        control, script_control = socket.socketpair()
        script = os.fork()
        if not script:
            os.setpgid(0, 0)
            _say_and_print(script_control, pipes[0][1])
            os._exit(0)
        script_control.close()
        for _, writer in pipes:
            os.close(writer)
        Relay(connection, script, [reader for reader, _ in pipes], control, None).run()
        os._exit(0)
    connection.close()
    unpacker, said, printed, ended = Unpacker(), 0, 0, False
    while not ended:
        for kind, payload in unpacker.feed(launcher.recv(1 << 16)):
            said += kind is FrameKind.SCRIPT
            printed += payload.count(b"\n") if kind is FrameKind.STDOUT else 0
            ended = kind is FrameKind.EXIT
            assert said >= printed
    launcher.close()
    assert os.waitpid(worker, 0)[1] == 0
    assert said == printed == ROUNDS
