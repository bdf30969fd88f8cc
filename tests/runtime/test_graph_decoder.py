"""Captured decoding against transformers' `generate`: on a CPU with the step in the graph's place, on a GPU with graphs."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import nstf.runtime
from nstf.errors import UnsupportedError
from nstf.runtime import graph_decoder
from nstf.runtime.artifact import write_artifact
from nstf.runtime.graph_decoder import Decoder
from nstf.runtime.graph_generate import use_graphs
from nstf.runtime.parameter import EncodedParameter
from nstf.runtime.sampling import Sampling, choose
from nstf.runtime.stacking import stack

sys.path.insert(0, str(Path(__file__).parent))
from test_engine import MODELS, build

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}


def ids_of(count: int, batch: int = 1) -> Tensor:
    return torch.randint(3, 100, (batch, count), generator=torch.Generator().manual_seed(0))


def loaded(tiny: ModuleType, folder: Path, name: str = "llama", device: str = "cpu", **options: Any) -> Any:
    """A model whose `generate` tries captured decoding."""
    path = tiny.write(folder, build(name))
    model: Any = nstf.runtime.load(path, device, engine="off", **options)
    use_graphs(model)
    return model


def by_transformers(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    found: Tensor = type(model).generate(model, ids, **arguments)
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_tokens_are_those_of_transformers(name: str, tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path, name)
    for batch, count in ((1, 9), (3, 40)):
        ids = ids_of(count, batch)
        assert torch.equal(model.generate(ids, **GREEDY), by_transformers(model, ids, **GREEDY))
    decoder = model.nstf_graphs.engine
    assert decoder is not None and len(decoder._state.tokens) == 3
    assert all(len(layer.qkv) == len(layer.gate_up) == 1 for layer in decoder._layers)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_are_those_of_the_modules(name: str, tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path, name)
    decoder = Decoder(model)
    ids = ids_of(60, 2)
    with torch.no_grad():
        expected = model(ids).logits
        decoder.prepare(2, 60, None)
        decoder._start(ids[:, :30], None)
        state: Any = decoder._state
        for at in range(30, 60):
            state.tokens.copy_(ids[:, at])
            torch.testing.assert_close(decoder.logits(state), expected[:, at], atol=1e-4, rtol=1e-4)
            state.position.add_(1)


def test_the_cache_grows_and_is_captured_anew(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_decoder, "SMALLEST_CAPACITY", 32)
    model = loaded(tiny, tmp_path)
    captured: list[Callable[[], None]] = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        step()  # as the run before a capture
        captured.append(step)
        return step

    decoder = Decoder(model, capture)
    ids, new = ids_of(10), 50
    with torch.no_grad():
        found = [token for (token,) in decoder.generate(ids, new)]
        assert decoder.capacity == 64 and len(captured) == 2
        expected = by_transformers(model, ids, **GREEDY | {"max_new_tokens": new})
        assert found == expected[0, 10:].tolist()
        # A shorter sequence later finds the larger cache and its graph.
        list(decoder.generate(ids, 5))
        assert len(captured) == 2
        # The prompt of this length comes the second time, and is captured.
        list(decoder.generate(ids, 5, Sampling()))
        assert len(captured) == 4


def test_capturing_draws_no_random_numbers(tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path)
    drawn: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 3.0, "eos_token_id": -1}
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(ids_of(5), **drawn))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    top = model.generate(ids_of(5), **drawn, top_k=1)
    assert torch.equal(top, by_transformers(model, ids_of(5), **GREEDY | {"max_new_tokens": 12}))


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 5}, {"top_k": 0, "top_p": 0.7}, {"top_k": 20, "top_p": 0.9, "temperature": 0.5}],
)
def test_draws_are_those_of_transformers(settings: dict[str, Any], tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path)
    arguments: dict[str, Any] = {
        "max_new_tokens": 40,
        "do_sample": True,
        "eos_token_id": -1,
        "pad_token_id": 0,
    }
    torch.manual_seed(3)
    expected = by_transformers(model, ids_of(5, 2), **arguments, **settings)
    torch.manual_seed(3)
    found = model.generate(ids_of(5, 2), **arguments, **settings)
    assert model.nstf_graphs.engine is not None and torch.equal(found, expected)


def test_a_choice_keeps_the_top_k_and_the_top_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    torch.manual_seed(0)

    def drawn(sampling: Sampling) -> set[int]:
        return {int(choose(logits, sampling)) for _ in range(300)}

    assert int(choose(logits, None)) == 0
    assert drawn(Sampling(top_k=0)) == {0, 1, 2, 3} and drawn(Sampling(top_k=3)) == {0, 1, 2}
    assert drawn(Sampling(top_k=0, top_p=0.6)) == {0, 1} and drawn(Sampling(top_k=4, top_p=0.01)) == {0}
    assert drawn(Sampling(top_k=0, temperature=0.02)) == {0}


def test_a_sequence_that_ends_is_filled_up(tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path)
    ids = ids_of(7, 4)
    whole = model.generate(ids, **GREEDY)
    stops = [int(whole[1, 10]), int(whole[2, 15])]
    arguments = GREEDY | {"eos_token_id": stops}
    assert torch.equal(model.generate(ids, **arguments), by_transformers(model, ids, **arguments))
    one = GREEDY | {"eos_token_id": stops[0]}
    assert torch.equal(model.generate(ids[1:2], **one), by_transformers(model, ids[1:2], **one))
    assert model.generate(ids[1:2], **one).shape[1] <= 11


def test_the_streamer_gets_each_token(tiny: ModuleType, tmp_path: Path) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, value: Tensor) -> None:
            self.got += value.reshape(-1).tolist()

        def end(self) -> None:
            self.got.append("end")

    model, streamer = loaded(tiny, tmp_path), Streamer()
    out = model.generate(ids_of(5), streamer=streamer, **GREEDY)
    assert streamer.got == [*out[0].tolist(), "end"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 3},
        {"return_dict_in_generate": True},
        {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])},
        {"stopping_criteria": []},
        {"cache_implementation": "static"},
    ],
)
def test_what_graphs_do_not_do_is_left_to_transformers(
    tiny: ModuleType, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    model = loaded(tiny, tmp_path)
    found = model.generate(ids_of(5), max_new_tokens=4, pad_token_id=0, do_sample=False, **arguments)
    assert (found if isinstance(found, Tensor) else found.sequences).shape[1] > 5
    assert model.nstf_graphs.engine is None and not model.nstf_graphs.tried


def test_a_changed_model_is_left_to_transformers(tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path)
    ids = ids_of(5)
    usual = model.generate(ids, **GREEDY)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.generate(ids, **GREEDY), usual) and copied.nstf_graphs.engine is None
    assert model.nstf_graphs.engine is not None
    handle = model.lm_head.register_forward_hook(lambda module, args, out: -out)
    assert not torch.equal(model.generate(ids, **GREEDY), usual)
    handle.remove()
    assert model.nstf_graphs.engine is None
    assert torch.equal(model.generate(ids, **GREEDY), usual)


def test_other_architectures_keep_their_generate(tiny: ModuleType, tmp_path: Path) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, tiny.new_model("GPT2LMHeadModel")), engine="off")
    use_graphs(model)
    assert model.generate(ids_of(5), **GREEDY).shape[1] == 25
    assert model.nstf_graphs.tried and model.nstf_graphs.engine is None
    with pytest.raises(UnsupportedError, match="architecture 'gpt2'"):
        Decoder(model)


def out_of_resources() -> Exception:
    errors = pytest.importorskip("triton.runtime.errors")
    return errors.OutOfResources(300000, 232448, "operation not permitted: shared memory")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "error", [lambda: RuntimeError("operation not permitted when stream is capturing"), out_of_resources]
)
def test_a_failed_capture_is_said_and_left_to_transformers(
    error: Callable[[], Exception], tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        raise error()

    model: Any = nstf.runtime.load(tiny.write(tmp_path, build("llama")), engine="off")
    use_graphs(model, lambda m: Decoder(m, refuse))
    assert model.generate(ids_of(5), **GREEDY).shape == (1, 25)
    assert "decoding goes through transformers: " in caplog.text and "operation not permitted" in caplog.text
    caplog.clear()
    assert model.generate(ids_of(5), **GREEDY).shape == (1, 25)
    assert "decoding goes through" not in caplog.text


def test_beyond_the_context_transformers_goes_on(tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path)
    assert model.generate(ids_of(500), **GREEDY).shape == (1, 520)


def test_the_cache_outlives_an_inference_mode(tiny: ModuleType, tmp_path: Path) -> None:
    model = loaded(tiny, tmp_path)
    with torch.inference_mode():
        first = model.generate(ids_of(5), **GREEDY)
    assert torch.equal(first, model.generate(ids_of(5), **GREEDY))


@pytest.mark.parametrize(
    "params",
    [
        ("int", {"bits": 4, "group": 32}),
        ("int", {"bits": 3, "group": 64, "symmetric": False, "scale_bits": 8}),
        ("fp8", {}),
        ("mxfp4", {}),
    ],
)
@pytest.mark.parametrize("kept", [False, True])
def test_parts_of_a_stack_are_what_they_were(
    params: tuple[str, dict[str, Any]], kept: bool, tiny: ModuleType
) -> None:
    from nstf.kernels.formats import decode
    from nstf.kernels.triton.packed import compact

    tree = tiny.leaf(params[0], **params[1])
    encoded = [tiny.random_encoded(tree, (rows, 96), seed) for seed, rows in enumerate((8, 5, 3))]
    for one in encoded:
        if params[0] == "fp8":  # codes that mean NaN
            one.arrays["codes"].clamp_(max=0x7E)
    joined = stack([compact(e) for e in encoded] if kept else encoded)
    assert joined is not None
    whole, parts = joined
    assert whole.shape == (16, 96)
    assert torch.equal(decode(whole), torch.cat([decode(e) for e in encoded]))
    for part, one in zip(parts, encoded, strict=True):
        assert torch.equal(decode(part), decode(one))
    first = parts[0].arrays["scale_codes" if "scale_codes" in parts[0].arrays else "scale"]
    held = whole.arrays["scale_codes" if "scale_codes" in whole.arrays else "scale"]
    assert first.data_ptr() == held.data_ptr()


def test_matrices_that_do_not_agree_stay_apart(tiny: ModuleType, tmp_path: Path) -> None:
    four, six = tiny.leaf("int", bits=4, group=32), tiny.leaf("int", bits=6, group=32)
    encoded = [tiny.random_encoded(four, (8, 96)), tiny.random_encoded(six, (8, 96))]
    assert stack(encoded) is None and stack(encoded[1:] * 2) is None
    model = loaded(tiny, tmp_path)
    odd: Any = model.model.layers[0].self_attn.k_proj.weight_encoded
    assert isinstance(odd, EncodedParameter)
    odd.__init__(tiny.random_encoded(six, tuple(odd.shape)), torch.float32)
    fresh: Any = copy.deepcopy(model)
    use_graphs(fresh)
    ids = ids_of(9)
    assert torch.equal(fresh.generate(ids, **GREEDY), by_transformers(fresh, ids, **GREEDY))
    assert [len(layer.qkv) for layer in fresh.nstf_graphs.engine._layers] == [3, 1, 1]


def dense(model: Any) -> Any:
    """The same model with dense matrices."""
    from nstf.kernels.formats import decode

    made = copy.deepcopy(build("llama"))
    values = {n: decode(p.encoded) for n, p in model.named_modules() if isinstance(p, EncodedParameter)}
    for name, parameter in made.named_parameters():
        source = values.get(name.replace(".weight", ".weight_encoded"))
        parameter.data.copy_(model.get_parameter(name) if source is None else source)
    return made.requires_grad_(False)


def test_dense_matrices_decode_too(tiny: ModuleType, tmp_path: Path) -> None:
    model = dense(loaded(tiny, tmp_path))
    ids = ids_of(9)
    expected = model.generate(ids, **GREEDY)
    use_graphs(model)
    assert torch.equal(model.generate(ids, **GREEDY), expected) and model.nstf_graphs.engine is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("batch", [1, 3])
def test_graphs_give_the_tokens_of_the_step_itself(
    name: str, batch: int, tiny: ModuleType, tmp_path: Path
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = loaded(tiny, tmp_path, name, "cuda", dtype=dtype)
        ids = ids_of(30, batch).cuda()
        direct = Decoder(model, lambda step: step)
        with torch.no_grad():
            for sampling in (None, Sampling(temperature=2.0, top_k=20, top_p=0.9)):
                torch.manual_seed(1)
                expected = list(direct.generate(ids, 60, sampling))
                torch.manual_seed(1)
                assert list(Decoder(model).generate(ids, 60, sampling)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(MODELS))
def test_generate_on_a_gpu_gives_the_tokens_of_transformers(
    name: str, tiny: ModuleType, tmp_path: Path
) -> None:
    model: Any = nstf.runtime.load(tiny.write(tmp_path, build(name)), "cuda", dtype=torch.float32)
    for batch in (1, 2):
        ids = ids_of(30, batch).cuda()
        found = model.generate(ids, **GREEDY | {"max_new_tokens": 100})
        expected = by_transformers(model, ids, **GREEDY | {"max_new_tokens": 100})
        assert model.nstf_graphs.engine is not None
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["trellis", "shuffle"])
def test_rows_of_a_turned_table_are_read_inside_of_a_graph(
    kind: str, tiny: ModuleType, tmp_path: Path
) -> None:
    """As `nstf convert --target sm_90` stores tables by default; torch's own look-up asks the host."""
    from nstf import quantizers

    module: Any = quantizers.method(kind)
    model = build("llama")
    tensors = tiny.encode_model(model)
    name = "model.embed_tokens.weight"
    table = model.get_parameter(name).detach().float()
    rows = {"sections": ((16, 48), (12, len(table) - 48))} if kind == "trellis" else {}
    tensors[name] = module.encode(table, module.Params(**rows, block=32))
    assert tensors[name].tree.kind == "rotated"
    path = tmp_path / "turned.nstf"
    write_artifact(path, tensors, {"config.json": json.dumps(tiny.config_json(model)).encode()})
    loaded_again: Any = nstf.runtime.load(path, "cuda", dtype=torch.bfloat16)
    ids = ids_of(30).cuda()
    direct = Decoder(loaded_again, lambda step: step)
    with torch.no_grad():
        assert list(Decoder(loaded_again).generate(ids, 60)) == list(direct.generate(ids, 60))


@pytest.mark.gpu
def test_a_grown_cache_on_a_gpu_continues_the_sequence(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_decoder, "SMALLEST_CAPACITY", 64)
    model = loaded(tiny, tmp_path, "llama", "cuda", dtype=torch.float32)
    decoder = Decoder(model)
    direct = Decoder(model, lambda step: step)
    ids, new = ids_of(30).cuda(), 300
    with torch.no_grad():
        assert list(decoder.generate(ids, new)) == list(direct.generate(ids, new))
    assert decoder.capacity == 512


def test_a_capture_does_not_write_where_the_last_sequence_ended(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_decoder, "SMALLEST_CAPACITY", 32)
    seen: list[int] = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        seen.append(int(decoder._state.position))  # type: ignore[union-attr]
        step()  # as a capture on a GPU warms up
        return step

    decoder = Decoder(loaded(tiny, tmp_path), capture)
    with torch.no_grad():
        list(decoder.generate(ids_of(10), 23))
        assert decoder.capacity == 32 and int(decoder._state.position) == 32  # type: ignore[union-attr]
        list(decoder.generate(ids_of(5), 3, Sampling()))
    assert seen == [0, 0, 0]  # two ways to choose tokens, and a prompt whose length came again


def test_memory_that_is_short_once_is_asked_for_again(tiny: ModuleType, tmp_path: Path) -> None:
    short = [True]

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        if short[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step

    model: Any = nstf.runtime.load(tiny.write(tmp_path, build("llama")), engine="off")
    use_graphs(model, lambda m: Decoder(m, capture))
    assert model.generate(ids_of(5), **GREEDY).shape == (1, 25) and model.nstf_graphs.engine.capacity == 0
    short[0] = False
    assert model.generate(ids_of(5), **GREEDY).shape == (1, 25) and model.nstf_graphs.engine.capacity > 0


def test_a_cast_model_goes_to_transformers(tiny: ModuleType, tmp_path: Path) -> None:
    model = dense(loaded(tiny, tmp_path))
    use_graphs(model)
    model.generate(ids_of(9), **GREEDY)
    assert model.nstf_graphs.engine is not None
    model.to(torch.bfloat16)
    assert model.generate(ids_of(9), **GREEDY).shape == (1, 29)
    assert model.nstf_graphs.engine is None


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": 0.0}, {"top_p": -0.5}])
def test_settings_out_of_range_are_refused_as_transformers_does(
    wrong: dict[str, float], tiny: ModuleType, tmp_path: Path
) -> None:
    model = loaded(tiny, tmp_path)
    with pytest.raises(ValueError, match=r"temperature|top_p"):
        model.generate(ids_of(5), **GREEDY | {"do_sample": True} | wrong)
