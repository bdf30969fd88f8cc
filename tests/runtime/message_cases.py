"""Sums, parts and words between three ranks: messages of sizes and dtypes that change, and a group of two of them.

python message_cases.py STORE RANK WAYS...  (started once for each rank; STORE: a file that is not there yet; WAYS: `shared`
                                            memory, `sent` through gloo: as where the last rank does not reach the memory)
"""

import random
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from nstf.errors import NstfError
from nstf.runtime import messages
from nstf.runtime.messages import MOST_BYTES, MOST_SHARED, Mailbox, SharedMailbox, mailbox
from nstf.runtime.ranks import OtherFailed, Ranks

SIZE, ROUNDS = 3, 60


OPENED = messages._opened


def own(rank: int, round_: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def check(ranks: Ranks, round_: int, draw: random.Random) -> None:
    """One exchange, the same on all ranks."""
    shape = (draw.choice((1, 2, 5)), draw.choice((1, 7, 64, 1000, MOST_BYTES // 4, MOST_SHARED // 32)))
    dtype = draw.choice((torch.float32, torch.float64))
    parts = [own(rank, round_, shape, dtype) for rank in range(ranks.size)]
    values, done = parts[ranks.rank].clone(), []
    kind = draw.choice(("sum", "meanwhile", "joined", "word"))
    with torch.inference_mode(draw.random() < 0.5):
        if kind == "joined":
            found = ranks.joined(values, shape[1], ranks.size * shape[1] - 1)
            assert torch.equal(found, torch.cat(parts, dim=-1)[..., :-1])
        elif kind == "word":
            assert ranks.all_can(True) and not ranks.all_can(ranks.rank > 0)
        else:
            # What a posted receive writes into must not be what an earlier call gave.
            found = ranks.sum(values.clone(), (lambda: done.append(1)) if kind == "meanwhile" else None)
            assert torch.equal(found, sum(parts, torch.zeros(shape, dtype=dtype)))
            assert len(done) == (kind == "meanwhile")


def failing(piece: torch.Tensor) -> torch.Tensor:
    raise NstfError("the disk fails")


def main(store: str, rank: int, way: str) -> None:
    messages._opened = (lambda path: None) if way == "sent" and rank == SIZE - 1 else OPENED
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=timedelta(minutes=3)
    )
    draw = random.Random(0)
    for round_ in range(ROUNDS):
        check(Ranks(rank, SIZE), round_, draw)
    assert type(mailbox(Ranks(rank, SIZE), 0)) is (SharedMailbox if way == "shared" else Mailbox)
    few = dist.new_group([0, 1])  # which all make
    if rank < 2:
        for round_ in range(ROUNDS):
            check(Ranks(rank, 2, few), round_, draw)
        two = Ranks(rank, 2, few)
        assert type(mailbox(two, 1)) is SharedMailbox
        arrays = {"codes": torch.arange(11, dtype=torch.int32)}
        assert torch.equal(two.read_together(arrays, torch.clone)["codes"], arrays["codes"])
        copy = failing if rank else torch.clone
        try:
            two.agree(lambda: two.read_together(arrays, copy), lambda _: "")
        except NstfError as error:  # on both: none waits for a piece that does not come
            assert type(error) is (NstfError if rank else OtherFailed)
        else:
            raise AssertionError("a piece was missing")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[3:]:
        main(f"{sys.argv[1]}-{each}", int(sys.argv[2]), each)
        print(each, file=sys.stderr)
