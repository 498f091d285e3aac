"""What kernels do with memory, watched in Triton's interpreter.

Inside `watched(module, …)` the modules' kernels run on copies of their tensors that lie far
from each other, and each launch runs twice, its programs in order and shuffled. A `MemoryFault`
says which program

- loads or stores outside of its tensor, also between the rows of a tensor with gaps,
- stores twice to one address at once, or to one that another program stores to,
- loads what another program stores, before or after,

and whether the order of the programs changes a bit of a result. `gpu_tiles()` gives the flash
kernels the tiles of a GPU; the window kernels have them everywhere.
"""

from contextlib import contextmanager

import numpy as np
import torch

GAP = 1 << 18  # bytes between tensors: a pointer astray by less meets nobody
NOBODY, SEVERAL = -1, -2


class MemoryFault(AssertionError):
    """What a program may not do with memory."""


class Room:
    """Copies of tensors with gaps between them, and who has read and written each number."""

    def __init__(self, tensors):
        extents = [self.extent(x) for x in tensors]
        sizes = (x.element_size() * n + GAP for x, n in zip(tensors, extents))
        starts = np.cumsum([GAP, *sizes])
        starts = [int(s) // 64 * 64 for s in starts]
        self.buffer = torch.zeros(starts[-1] + GAP, dtype=torch.uint8)
        self.tensors, self.copies, self.places = tensors, [], []
        for x, n, start in zip(tensors, extents, starts):
            own = self.buffer[start : start + n * x.element_size()].view(x.dtype)
            copy = own.as_strided(x.shape, x.stride())
            copy.copy_(x.detach())
            exists = torch.zeros(n, dtype=torch.bool)
            exists.as_strided(x.shape, x.stride()).fill_(True)
            self.copies.append(copy)
            who = np.full((2, n), NOBODY)  # readers, writers
            self.places.append((own.data_ptr(), x.element_size(), exists.numpy(), who))

    @staticmethod
    def extent(x):
        """How many numbers lie from a tensor's first to its last."""
        return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0

    def find(self, addresses, what):
        """The tensor of these addresses, and which of its numbers they are."""
        for start, size, exists, who in self.places:
            if start <= addresses[0] < start + size * len(exists):
                at, rest = np.divmod(addresses - start, size)
                inside = (at >= 0) & (at < len(exists)) & (rest == 0)
                if not (inside.all() and exists[at].all()):
                    break
                return at, who
        raise MemoryFault(f"{what} outside of its tensor")

    def load(self, addresses, program):
        at, (readers, writers) = self.find(addresses, f"program {program} loads")
        own = (writers[at] == NOBODY) | (writers[at] == program)
        if not own.all():
            raise MemoryFault(f"program {program} loads what another has stored")
        before = readers[at]
        readers[at] = np.where((before == NOBODY) | (before == program), program, SEVERAL)

    def store(self, addresses, program):
        at, (readers, writers) = self.find(addresses, f"program {program} stores")
        if len(np.unique(at)) < len(at):
            raise MemoryFault(f"program {program} stores twice to one address at once")
        for who, did in ((writers[at], "stored"), (readers[at], "loaded")):
            if not ((who == NOBODY) | (who == program)).all():
                raise MemoryFault(f"program {program} stores where another has {did}")
        writers[at] = program


@contextmanager
def interpreter_watched(room, order):
    """While kernels run, program i is the program order[i], and all it does is looked at."""
    from triton.runtime.interpreter import interpreter_builder as builder

    load, store, place = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.set_grid_idx,
    )

    def active(pointers, mask):
        return pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.int64)

    def watched_load(pointers, mask, *rest):
        if len(addresses := active(pointers, mask)):
            room.load(addresses, builder.grid_idx[0])
        return load(pointers, mask, *rest)

    def watched_store(pointers, value, mask, *rest):
        if len(addresses := active(pointers, mask)):
            room.store(addresses, builder.grid_idx[0])
        return store(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    builder.set_grid_idx = lambda x, y, z: place(int(order[x]), y, z)
    try:
        yield
    finally:
        for name in ("create_masked_load", "create_masked_store", "set_grid_idx"):
            delattr(builder, name)  # the class's own are seen again


def run_watched(launch, kernel, programs, device, *arguments, **options):
    """A launch, in order and shuffled; the results are those of the launch itself."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    rooms, orders = [], (np.arange(programs), np.random.default_rng(0).permutation(programs))
    for order in orders:
        room = Room(tensors)
        copies = iter(room.copies)
        own = [next(copies) if isinstance(x, torch.Tensor) else x for x in arguments]
        with interpreter_watched(room, order):
            try:
                launch(kernel, programs, device, *own, **options)
            except Exception as error:  # the interpreter wraps what is raised in it
                cause = error
                while cause is not None and not isinstance(cause, MemoryFault):
                    cause = cause.__cause__
                raise cause or error from None
        rooms.append(room)
    if not torch.equal(rooms[0].buffer, rooms[1].buffer):
        raise MemoryFault("the order of the programs changes the result")
    for x, copy, (*_, (_, writers)) in zip(tensors, rooms[0].copies, rooms[0].places):
        if (writers != NOBODY).any():
            x.detach().copy_(copy)


@contextmanager
def watched(*modules, change=lambda arguments: arguments):
    """Watch all launches of these modules; yields the list of kernels that have been launched.

    `change` may change a launch's arguments, to seed a fault.
    """
    names, before = [], [module.launch for module in modules]

    def launch(kernel, programs, device, *arguments, **options):
        names.append(kernel.__name__)
        run_watched(before[0], kernel, *change([programs, device, *arguments]), **options)

    for module in modules:
        module.launch = launch
    try:
        yield names
    finally:
        for module, own in zip(modules, before):
            module.launch = own


@contextmanager
def gpu_tiles(shared=163 << 10):
    """The flash kernels take the tiles that they have on a GPU with so much shared memory."""
    from attnlib import flash

    before = flash._options

    def options(kernel, q, k, v, extra):
        own = before(kernel, q, k, v, extra)
        widths = q.shape[-1], v.shape[-1]
        return own | flash.tiling(kernel, *widths, q.element_size(), extra, shared)

    flash._options = options
    try:
        yield
    finally:
        flash._options = before
