"""How much a compute graph takes on each device: ggml's scheduler and graph allocator on sizes alone. Pure.

The buffers that llama.cpp calls compute buffers are the high-water marks of this allocator over the graph of one full
batch. It places every tensor best-fit, lets some operations overwrite a source that nobody else reads, and frees a
tensor after its last reader; holes that nothing fits into are lost, so that a sum of live tensors is too little.

Source: ggml/src/ggml-alloc.c (``ggml_dyn_tallocr_alloc``, ``ggml_gallocr_alloc_graph_impl``) and
ggml/src/ggml-backend.cpp (``ggml_backend_sched_split_graph``).
"""

from __future__ import annotations

from collections.abc import Sequence

ALIGNMENT = 32  # of ggml's CPU buffers, and so of an RPC device that a CPU serves
_ENDLESS = 1 << 62


class Graph:
    """Tensors in the order of their computation. A tensor is an index; ``on`` a device, 0 being the host.

    An operation whose weights lie on a device runs there. Any other runs where its neighbours do, on a card if it can.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._sources: list[tuple[int, ...]] = []
        self._over: list[int] = []
        self._on: list[int | None] = []
        self._inputs: list[int] = []
        self._stored: list[int] = []
        self._kept: list[int] = []
        self._writes: set[int] = set()
        self._views: dict[int, int] = {}

    def input(self, size: int) -> int:
        """A tensor that the host fills before the graph runs."""
        self._inputs.append(len(self._sizes))
        return self._add(size, (), 0, 0)

    def stored(self, size: int, on: int) -> int:
        """A weight or a cache: it takes nothing here, but for the copy that another device makes to read it."""
        self._stored.append(len(self._sizes))
        return self._add(size, (), 0, on)

    def node(self, size: int, *sources: int, over: int = 0, on: int | None = None) -> int:
        """The result of an operation.

        Args:
            size: its bytes.
            sources: what it reads, in ggml's order; weights of its own device may be left out.
            over: how many of the first sources it may overwrite, if one of the same size has no other reader.
            on: the device of its weights or its cache.
        """
        return self._add(size, sources, over, on)

    def view(self, tensor: int, size: int) -> int:
        """A view of ``tensor`` that spans so many bytes: another device makes a copy of each view that it reads."""
        alias = self.stored(size, 0)
        self._views[alias] = tensor
        return alias

    def write(self, *sources: int, on: int | None) -> None:
        """A write into what there is, a cache or a state on the device ``on``: it only reads."""
        self._writes.add(self.node(0, *sources, on=on))

    def keep(self, tensor: int) -> None:
        """Never free or overwrite ``tensor``: it is an output."""
        self._kept.append(tensor)

    def _add(self, size: int, sources: tuple[int, ...], over: int, on: int | None) -> int:
        self._sizes.append(-(-size // ALIGNMENT) * ALIGNMENT)
        self._sources.append(sources)
        self._over.append(over)
        self._on.append(on)
        return len(self._sizes) - 1

    def peaks(self, devices: int, copies: int = 1) -> list[int]:
        """Bytes on each of ``devices``.

        Args:
            devices: how many, the host included.
            copies: of all that goes from one device to another; several where cards work as a pipeline.
        """
        placed = self._placed()
        steps, sizes = self._split(placed)
        nothing = len(self._sizes)
        readers = [0] * len(sizes)
        for _, _, sources in steps:
            for source in sources:
                readers[source] += 1
        for tensor in self._kept:
            readers[tensor] += 1
        heaps = [_Heap() for _ in range(devices)]
        where: list[tuple[_Heap, int] | None] = [None] * len(sizes)
        for tensor in self._inputs:
            for _ in range(copies):
                where[tensor] = heaps[0], heaps[0].take(sizes[tensor])
            readers[tensor] += copies > 1  # then never freed
        if copies > 1:
            for tensor, device, sources in steps:
                if tensor > nothing and not sources:
                    for _ in range(copies):
                        where[tensor] = heaps[device], heaps[device].take(sizes[tensor])
                    readers[tensor] += 1
        for tensor, device, sources in steps:
            size = sizes[tensor]
            if where[tensor] is None and tensor != nothing and tensor not in self._writes:
                over = self._over[tensor] if tensor < len(self._over) else 0
                for source in sources[:over]:
                    if readers[source] == 1 and sizes[source] == size and where[source] is not None:
                        where[tensor], where[source] = where[source], None
                        break
                else:
                    where[tensor] = heaps[device], heaps[device].take(size)
            for source in sources:
                readers[source] -= 1
                spot = where[source]
                if not readers[source] and spot is not None:
                    spot[0].give(spot[1], sizes[source])
                    where[source] = None
        return [heap.most for heap in heaps]

    def _placed(self) -> list[int]:
        """Passes 1 and 2 of the scheduler: cards spread downwards, then upwards, then the host over the rest."""
        nodes = self._nodes()
        placed = list(self._on)
        for host in (False, True):
            for order in (nodes, nodes[::-1]):
                current: int | None = None
                for i in order:
                    device = placed[i]
                    if device is None:
                        placed[i] = current
                    else:
                        current = device if device or host else None
        return [device or 0 for device in placed]

    def _split(self, placed: Sequence[int]) -> tuple[list[tuple[int, int, tuple[int, ...]]], list[int]]:
        """Pass 5: ((tensor, device, sources) in order, sizes), with a copy of what a device reads from another one.

        Copies are made where a run of nodes on one device begins, and are kept until that device's last reader.
        """
        sizes = [*self._sizes, 0]
        nothing = len(self._sizes)  # reads the original when its copy is made
        steps: list[tuple[int, int, tuple[int, ...]]] = []
        copies: dict[tuple[int, int], int] = {}
        nodes = self._nodes()
        start = 0
        while start < len(nodes):
            device = placed[nodes[start]]
            end = start
            while end < len(nodes) and placed[nodes[end]] == device:
                end += 1
            for node in nodes[start:end]:
                for source in self._sources[node]:
                    whole = self._views.get(source, source)
                    if placed[whole] != device and (source, device) not in copies:
                        copies[source, device] = len(sizes)
                        sizes.append(sizes[source])
                        steps += [(nothing, device, (whole,)), (copies[source, device], device, ())]
            for node in nodes[start:end]:
                read = (copies.get((i, device), self._views.get(i, i)) for i in self._sources[node])
                steps.append((node, device, tuple(read)))
            start = end
        return steps, sizes

    def _nodes(self) -> list[int]:
        leaves = {*self._inputs, *self._stored}
        return [tensor for tensor in range(len(self._sizes)) if tensor not in leaves]


class _Heap:
    """One device's addresses: free ranges in order, the last one endless."""

    def __init__(self) -> None:
        self._free: list[list[int]] = [[0, _ENDLESS]]  # [offset, size]
        self.most = 0

    def take(self, size: int) -> int:
        """The offset of the smallest free range that ``size`` fits into."""
        best = len(self._free) - 1
        smallest = _ENDLESS
        for i, (_, room) in enumerate(self._free[:-1]):
            if size <= room <= smallest:
                best, smallest = i, room
        block = self._free[best]
        offset = block[0]
        block[0] += size
        block[1] -= size
        if not block[1]:
            del self._free[best]
        self.most = max(self.most, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free a range and join it with its neighbours, as far as ggml does: an empty range can keep two apart."""
        free = self._free
        for i, block in enumerate(free):
            if block[0] + block[1] == offset:
                block[1] += size
                if i + 1 < len(free) and block[0] + block[1] == free[i + 1][0]:
                    block[1] += free.pop(i + 1)[1]
                return
            if offset + size == block[0]:
                block[0], block[1] = offset, block[1] + size
                if i and sum(free[i - 1]) == offset:
                    free[i - 1][1] += free.pop(i)[1]
                return
        index = 0
        while index < len(free) and free[index][0] < offset:
            index += 1
        free.insert(index, [offset, size])
