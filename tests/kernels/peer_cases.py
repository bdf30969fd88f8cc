"""Sums over ranks by memory, one rank after the other in one process; as a program, as JSON.

Interpreted kernels run in a process of their own: Triton reads TRITON_INTERPRET when it is imported. A rank that runs alone
would wait for ever, so the words that the others will write are put there before, and compared with what they write then.
"""

import json

import torch
from torch import Tensor

from nstf.kernels.torch.decode_step import add_norm
from nstf.kernels.triton.ending import Ending, Meeting
from nstf.kernels.triton.peer_rows import MOST_ROWS, Twins, met_norm
from nstf.kernels.triton.peer_rows import MOST_VALUES as MOST_VALUES16
from nstf.kernels.triton.peers import BLOCK, MOST_VALUES, Peers, peer_sum
from nstf.kernels.triton.sums import ended, ending_spec


def rooms_of(ranks: int) -> tuple[list[Tensor], list[Peers]]:
    """(the memory of each rank, what each knows of them)."""
    rooms = [torch.zeros(2, ranks, MOST_VALUES, dtype=torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([room.data_ptr() for room in rooms])
    calls = MOST_VALUES // BLOCK
    return rooms, [Peers(addresses, torch.zeros(calls, dtype=torch.int32), r, ranks) for r in range(ranks)]


def words(values: Tensor, call: int) -> Tensor:
    """What a rank writes for flat values: filled up to whole programs."""
    flat = torch.nn.functional.pad(values.float().flatten(), (0, -values.numel() % BLOCK))
    return (call << 32) | (flat.view(torch.int32).long() & 0xFFFFFFFF)


def sums_are_right(ranks: int, size: int, dtype: torch.dtype) -> bool:
    rooms, peers = rooms_of(ranks)
    right = True
    for call in (1, 2, 3):
        given = [
            torch.randn(size, generator=torch.Generator().manual_seed(call + r)).to(dtype)
            for r in range(ranks)
        ]
        expected = torch.stack([v.float() for v in given])
        total = torch.zeros(size)
        for values in expected:
            total = total + values
        sent = [words(v, call) for v in given]
        for room in rooms:
            for rank in range(ranks):
                room[call & 1, rank, : len(sent[rank])] = sent[rank]
        for rank in range(ranks):
            for other, room in enumerate(rooms):
                if other != rank:
                    room[call & 1, rank].zero_()
            peer_sum(given[rank], peers[rank], "sm_90")
            right &= torch.equal(given[rank], total.to(dtype))
            for other, room in enumerate(rooms):
                right &= other == rank or torch.equal(room[call & 1, rank, : len(sent[rank])], sent[rank])
    return right


def alone_is_no_wait(rank: int, ranks: int) -> bool:
    """What stands for the others when a rank tries its kernels without them."""
    own = torch.zeros(2, ranks, MOST_VALUES, dtype=torch.int64)
    mirrored = torch.tensor([own.data_ptr() + (o - rank) * MOST_VALUES * 8 for o in range(ranks)])
    peers = Peers(mirrored, torch.zeros(MOST_VALUES // BLOCK, dtype=torch.int32), rank, ranks)
    values = torch.randn(600, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        found = values.clone()
        peer_sum(found, peers, "sm_90")
        if not torch.allclose(found, ranks * values):
            return False
    return True


def an_ending_sums(batch: int, rows: int) -> bool:
    """The launch that adds a product onto the residual stream: of two ranks as of one with both parts."""
    rooms, peers = rooms_of(2)
    random = torch.Generator().manual_seed(1)
    parts = [torch.randn(3, batch, rows, generator=random) for _ in range(2)]
    gain, stream = torch.rand(rows, generator=random) + 0.5, torch.randn(batch, rows, generator=random)
    right = True
    for call in (1, 2):
        # Programs are numbered row by row of the batch.
        width = -(-rows // BLOCK) * BLOCK
        for rank in range(2):
            part = torch.zeros(batch, rows)
            for some in parts[rank]:
                part = part + some
            filled = torch.nn.functional.pad(part, (0, width - rows))
            rooms[1 - rank][call & 1, rank, : batch * width] = words(filled, call)
        found = []
        for rank in range(2):
            h = stream.clone()
            ending = Ending(adds=True, rank=rank, ranks=2)
            spec = ending_spec(batch, rows, 64, 3, torch.bfloat16, ending, "sm_90")
            meeting = Meeting(h=h, gain=gain, peers=peers[rank])
            y, squares = ended(parts[rank], 64, torch.bfloat16, spec, meeting)
            found.append((h, y, squares))
        spec = ending_spec(batch, rows, 64, 6, torch.bfloat16, Ending(adds=True), "sm_90")
        h = stream.clone()
        y, squares = ended(torch.cat(parts), 64, torch.bfloat16, spec, Meeting(h=h, gain=gain))
        for a, b, c in zip(*found, (h, y, squares), strict=True):
            right &= torch.equal(a, b) and torch.allclose(a.float(), c.float(), rtol=2e-2, atol=2e-2)
    return right


def rows_are_added(rows: int, size: int, out_gain: bool) -> bool:
    """Rows of a prompt onto the residual stream, as `add_norm` does of both parts; the other's were there before."""
    random = torch.Generator().manual_seed(rows)
    own = (torch.full((MOST_VALUES16,), 77, dtype=torch.int16), torch.zeros(MOST_VALUES16, dtype=torch.int16))
    theirs = (torch.zeros_like(own[0]), torch.zeros_like(own[1]))
    words, said, calls = (torch.zeros(2, MOST_ROWS, dtype=torch.int32) for _ in range(3))
    twins = Twins(own, theirs, words, said, calls[0])
    gain, second = (torch.rand(size, generator=random) + 0.5 for _ in range(2))
    right = True
    for call, turn in enumerate((0, 1, 0), start=1):
        y, other = (torch.randn(rows, size, generator=random).to(torch.float16) for _ in range(2))
        own[turn][: y.numel()] = other.flatten().view(torch.int16)
        words[turn, :rows] = call
        h = torch.randn(rows, size, generator=random)
        stream, after = h.clone(), second if out_gain else None
        twins.place(turn, rows, size, y.dtype).copy_(y)
        x = met_norm(h, y, gain, 1e-5, twins, turn, "sm_90", after)
        total = (y.float() + other.float()).half()
        expected = add_norm(stream, total, gain, 1e-5, torch.float16, after)
        right &= torch.allclose(h, stream, atol=1e-6) and torch.allclose(x, expected, atol=2e-3, rtol=2e-3)
        right &= torch.equal(theirs[turn][: y.numel()].view(torch.float16), y.flatten())
        right &= bool((said[turn, :rows] == call).all()) and not bool(said[turn, rows:].any())
        right &= bool((calls[0, :rows] == call).all()) and not bool(calls[0, rows:].any())
    return right


def main() -> None:
    import quick_interpreter

    quick_interpreter.install()
    found = {
        f"{ranks} ranks, {size} of {str(dtype)[6:]}": sums_are_right(ranks, size, dtype)
        for ranks, size, dtype in ((2, 700, torch.float32), (3, 256, torch.float16), (2, 5, torch.float16))
    }
    found |= {
        f"alone, {rank} of {ranks}": alone_is_no_wait(rank, ranks) for rank, ranks in ((0, 2), (1, 2), (1, 3))
    }
    found |= {
        f"ending, {batch} x {rows}": an_ending_sums(batch, rows) for batch, rows in ((1, 512), (3, 300))
    }
    found |= {f"rows of {n}, {g}": rows_are_added(3, n, g) for n, g in ((64, False), (40, True))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
