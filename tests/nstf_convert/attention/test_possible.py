"""What is refused before anything takes long, and the memory of a profile as predicted and as measured."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from nstf.errors import UsageError
from nstf_convert.pipeline.attention.possible import Sizes, beyond, check_memory, needed_bytes
from nstf_convert.pipeline.machine import BASE_BYTES, Machine

SMOL = Sizes(30, 576, 1536, 9, 3, 64, 49152, 2)
CPU = Machine((torch.device("cpu"),), 2, 2 << 30, 0, True)

PROGRAM = """
import json, resource, sys
import torch, transformers
from nstf_convert.streamed import StreamedModel
from nstf_convert.pipeline.attention.possible import Sizes, needed_bytes
from nstf_convert.pipeline.attention.profile import profile

torch.set_num_threads(1)
tokens = int(sys.argv[1])
config = transformers.LlamaConfig(
    vocab_size=200, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
)
torch.manual_seed(0)
weights = transformers.LlamaForCausalLM(config).state_dict()
model = StreamedModel({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, weights.__getitem__)
ids = torch.randint(0, 200, (tokens,), generator=torch.Generator().manual_seed(0))
profile(model, [ids[:256]], 0)  # what the libraries take, whatever the context is
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
profile(model, [ids], 0)
print(json.dumps([peak() - before, *needed_bytes(Sizes.of(config, 1), tokens, "cpu")]))
"""


@pytest.mark.slow
def test_a_profile_stays_within_the_predicted_memory() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "3072"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, work, _ = json.loads(done.stdout)
    # Near enough to be of use; the smallest context's memory was there before.
    assert work / 4 < grown < work, (grown, work)


def test_a_context_beyond_the_memory_is_refused_with_one_that_fits() -> None:
    check_memory(SMOL, 2048, CPU)
    with pytest.raises(
        UsageError, match=r"at 65536 tokens takes about .* GiB of memory, 2.0 are allowed"
    ) as found:
        check_memory(SMOL, 65536, CPU)
    fitting = int(str(found.value).split("`context` ")[1].split()[0])
    assert 2048 <= fitting < 65536 and beyond(SMOL, fitting, CPU) is None
    assert beyond(SMOL, fitting + 128, CPU) is not None
    short = replace(CPU, host_bytes=BASE_BYTES)
    with pytest.raises(UsageError, match="no context fits, or give more `memory`"):
        check_memory(SMOL, 2048, short)


def test_a_gpu_holds_the_work_and_the_host_what_waits() -> None:
    gpu = Machine((torch.device("cuda"),), 2, 4 << 30, 2 << 30, True)
    with pytest.raises(
        UsageError, match=r"GiB of GPU memory, 2.0 are allowed: `context` \d+ fits, or give more `gpu_m"
    ):
        check_memory(SMOL, 65536, gpu)
    with pytest.raises(UsageError, match=r"GiB of memory, 1.8 are allowed"):
        check_memory(SMOL, 65536, replace(gpu, host_bytes=1850 << 20, gpu_bytes=64 << 30))


def test_longer_contexts_and_larger_models_need_more() -> None:
    work, waiting = needed_bytes(SMOL, 8192, "cpu")
    assert (
        needed_bytes(SMOL, 16384, "cpu")[0] > 1.7 * work
        and needed_bytes(SMOL, 16384, "cpu")[1] == 2 * waiting
    )
    assert needed_bytes(replace(SMOL, layers=60), 8192, "cpu")[0] > work
    assert needed_bytes(replace(SMOL, texts=3), 8192, "cpu")[1] * 2 == 3 * waiting
