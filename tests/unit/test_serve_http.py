"""The server's socket."""

from __future__ import annotations

import asyncio
import socket

from ggufspec.serve import http
from ggufspec.serve.http import listen


def test_small_pieces_of_an_answer_are_sent_at_once() -> None:
    async def connected() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            found.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0) as bound:
            async with await asyncio.start_server(accepted, sock=bound):
                _, writer = await asyncio.open_connection(*bound.getsockname()[:2])
                try:
                    return await asyncio.wait_for(found, 10)
                finally:
                    writer.close()

    assert asyncio.run(connected())


def test_an_ipv6_address_is_taken_as_in_a_url() -> None:
    if not socket.has_ipv6:
        return
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:  # this machine has none
        return
    for host in ("[::1]", "::1"):
        with listen(host, 0) as bound:
            assert http.endpoint_url(bound) == f"http://[::1]:{bound.getsockname()[1]}"
