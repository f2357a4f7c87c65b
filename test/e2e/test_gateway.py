"""The relay between a node and S3: what is cut is refused, what is held goes on when it is healed, and both are counted."""

import socket
import threading

import pytest

from stream_s3_e2e.gateway import Gateway
from stream_s3_e2e.wait import wait_until


@pytest.fixture
def echo():
    """A server that sends back what it gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(connection):
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.fixture
def gateway(echo):
    made = Gateway(echo)
    yield made
    made.stop()


def connect(gateway):
    host, port = gateway.endpoint.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 10)
    connection.settimeout(10)
    return connection


def says(connection, text):
    """Whether what is sent comes back."""
    connection.sendall(text)
    return connection.recv(4096) == text


def test_bytes_pass(gateway):
    with connect(gateway) as one, connect(gateway) as other:
        assert says(one, b"one") and says(other, b"other") and says(one, b"again")
    assert (gateway.connections, gateway.bitten) == (2, 0)


def test_a_cut_breaks_what_is_open_and_refuses_what_comes(gateway):
    with connect(gateway) as connection:
        assert says(connection, b"before")
        gateway.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert gateway.broken == 1
    # Seen while connecting or at the first read, as it comes.
    with pytest.raises(ConnectionResetError), connect(gateway) as connection:
        connection.recv(1)
    assert gateway.refused == 1
    gateway.heal()
    with connect(gateway) as connection:
        assert says(connection, b"after")


def test_what_is_held_goes_on_when_it_is_healed(gateway):
    with connect(gateway) as connection:
        assert says(connection, b"before")
        gateway.hold()
        connection.sendall(b"held")
        wait_until(lambda: gateway.held == 1, 10, "the relay holds what was sent")
        gateway.heal()
        assert connection.recv(4096) == b"held"
    assert gateway.broken == gateway.refused == 0
