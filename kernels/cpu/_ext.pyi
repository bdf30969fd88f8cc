from collections.abc import Callable, Sequence
from typing import Any

def ldlq_sweep(
    weight: Any,
    importance: Any,
    diagonal: Any,
    upper: Any,
    order: Any,
    table: Any,
    middles: Any,
    ratios: Any,
    width: int,
    bits: int,
    symmetric: bool,
    signs: bool,
    refit: bool,
    frozen: bool,
    mode: int,
    reach: float,
    scale: Any,
    zero: Any,
    largest: Any,
    codes: Any,
    loss: Any,
    threads: int,
    most_lanes: int = 16,
) -> None: ...
def ldlq_refit(
    weight: Any,
    hessian: Any,
    table: Any,
    width: int,
    bits: int,
    mode: int,
    scale: Any,
    zero: Any,
    largest: Any,
    codes: Any,
    gain: Any,
    threads: int,
    most_lanes: int = 16,
) -> None: ...

class PackedLinear:
    def __init__(
        self,
        kind: str,
        cols: int,
        group: int,
        bits: int,
        codes: Any,
        scale: Any,
        super_scale: Any = None,
        zeros: Any = None,
        table: Any = None,
        isa: str = "",
    ) -> None: ...
    @property
    def isa(self) -> str: ...
    def matmul_at(self, x: int, batch: int, y: int, threads: int) -> None: ...
    def decode(self, start: int, out: Any, threads: int) -> None: ...
    def has_nan(self) -> bool: ...
    def view(self) -> int: ...

def row_kernels() -> list[str]: ...
def trellis_viterbi(
    targets: Any, quarter_bits: int, codebook: Any, codes: Any, threads: int, most_lanes: int = 16
) -> None: ...
def trellis_decode(codes: Any, quarter_bits: int, codebook: Any, out: Any, threads: int) -> None: ...
def trellis_matmul(
    codes: Any, quarter_bits: int, codebook: Any, x: Any, out: Any, threads: int, most_lanes: int = 16
) -> None: ...
def shuffle_round(
    target: Any,
    weight: Any,
    scale: Any,
    importance: Any,
    feedback: Any,
    quarter_bits: int,
    tables: Any,
    rounded: Any,
    codes: Any,
    threads: int,
) -> None: ...

class Convolution:
    def __init__(
        self,
        weight: EngineMatrix,
        channels: int,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        before: tuple[int, int],
        after: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
    ) -> None: ...
    def run_at(
        self,
        x: int,
        images: int,
        height: int,
        width: int,
        gain: int,
        bias: int,
        added: int,
        least: float,
        most: float,
        y: int,
        last: bool,
        threads: int,
    ) -> None: ...

class ImageSteps:
    def __init__(self) -> None: ...
    def add(
        self, convolution: Convolution, source: int, to: int, added: int, least: float, most: float
    ) -> None: ...
    def add_pool(
        self,
        source: int,
        to: int,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        before: tuple[int, int],
    ) -> None: ...
    def add_mean(self, source: int, to: int) -> None: ...
    def add_linear(self, source: int, to: int, inputs: int, outputs: int) -> None: ...
    def sizes(self, channels: int, height: int, width: int) -> tuple[int, int, int] | None: ...
    def run_at(
        self,
        x: int,
        images: int,
        size: tuple[int, int, int],
        numbers: list[int],
        eps: list[float],
        y: int,
        last: bool,
        threads: int,
    ) -> None: ...

class EngineMatrix:
    @property
    def kernel(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def multiply_at(self, x: int, batch: int, y: int, threads: int) -> None: ...
    def decode_at(self, row: int, out: int) -> None: ...

class GroupedMatrices:
    def __init__(self, experts: int, rows: int, cols: int) -> None: ...
    def set(self, expert: int, matrix: EngineMatrix) -> None: ...
    def missing_at(self, offsets: int) -> list[int]: ...
    def multiply_at(self, offsets: int, x: int, order: int, choices: int, y: int, threads: int) -> None: ...

def group_at(index: int, count: int, experts: int, order: int, offsets: int) -> None: ...
def combine_at(
    parts: int,
    order: int,
    taken: int,
    weights: int,
    tokens: int,
    choices: int,
    cols: int,
    y: int,
    threads: int,
) -> None: ...

class EngineCopies:
    def __init__(self) -> None: ...
    def run(self, threads: int) -> None: ...

def engine_packed(linear: PackedLinear, exact: bool, copies: EngineCopies | None = None) -> EngineMatrix: ...
def engine_trellis(
    rows: int,
    cols: int,
    quarter_bits: list[int],
    section_rows: list[int],
    codes: Any,
    numbers: Any,
    number_bits: int,
    scale: Any,
    top: Any,
    quantiles: Any,
    exact: bool,
    copies: EngineCopies | None = None,
) -> EngineMatrix: ...
def engine_shuffle(
    rows: int,
    cols: int,
    quarter_bits: int,
    codes: Any,
    tables: Any,
    step: float,
    scale: Any,
    top: Any,
    exact: bool,
    copies: EngineCopies | None = None,
) -> EngineMatrix: ...
def engine_dense(rows: int, cols: int, values: Any, type: str) -> EngineMatrix: ...
def engine_low_rank(a: EngineMatrix, b: EngineMatrix) -> EngineMatrix: ...
def engine_sum(a: EngineMatrix, b: EngineMatrix) -> EngineMatrix: ...
def engine_rotated(x: EngineMatrix, seed: int, block: int) -> EngineMatrix: ...
def engine_rotated_rows(x: EngineMatrix, seed: int, block: int) -> EngineMatrix: ...
def argmax(values: Any) -> int: ...
def argmax_at(values: int, count: int) -> int: ...
def engine_transposed(x: EngineMatrix) -> EngineMatrix: ...
def engine_reshaped(x: EngineMatrix, rows: int, cols: int) -> EngineMatrix: ...
def engine_chain(
    kind: str, rows: int, cols: int, view: Any, ranks: Any, parts: Any, way: str
) -> EngineMatrix | None: ...
def engine_int8() -> bool: ...
def isas() -> list[str]: ...
def isa() -> str: ...
def use_isa(isa: str) -> None: ...

class Engine:
    def __init__(
        self,
        shape: dict[str, Any],
        embedding: EngineMatrix,
        head: EngineMatrix,
        final_norm: Any,
    ) -> None: ...
    def add_layer(self, layer: dict[str, Any]) -> None: ...
    def add_rotation(self, frequencies: Any) -> None: ...
    def divide(self, sum: Callable[[int, int], object], join: Callable[[int, int, int], object]) -> None: ...
    def run(self, ids: int, count: int, first: int, logits: int, all: bool, threads: int) -> None: ...
    def go_on(
        self, token: int, first: int, count: int, stop: list[int], found: int, threads: int
    ) -> tuple[int, bool]: ...
    def step(
        self, ids: int, parts: list[tuple[int, int, int, bool, bool]], logits: int, least: int, threads: int
    ) -> None: ...
    def set_sequences(self, count: int) -> None: ...
    def copy(self, source: int, target: int, positions: int) -> None: ...
    def resumable(self, sequence: int, positions: int) -> int: ...
    def release(self, sequence: int) -> None: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...

class LayerAttention:
    def __init__(
        self, heads: int, kv_heads: int, size: int, window: int, scale: float, plan: dict[str, Any]
    ) -> None: ...
    def run(self, q: Any, k: Any, v: Any, first: int, out: int, decode: bool, threads: int) -> None: ...
    def copy(self, source: LayerAttention, positions: int) -> None: ...
    def resumable(self, positions: int) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...

class Awake:
    def __init__(self) -> None: ...
    def stop(self) -> None: ...

class SharedBox:
    def __init__(
        self, file: int, rank: int, ranks: int, capacity: int, spin_us: float, limit_s: float
    ) -> None: ...
    @staticmethod
    def size_bytes(ranks: int, capacity: int) -> int: ...
    def exchange(self, source: int, size: int, out: int) -> None: ...
    def sum(self, source: int, count: int) -> None: ...

def sha256_available() -> bool: ...
def sha256(arrays: Sequence[memoryview]) -> bytes: ...
def read_bandwidth(size: int, threads: int, passes: int = 5) -> float: ...
def read_bytes(bytes: Any, threads: int) -> int: ...
def filter_scores(
    logits: int,
    vocab: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    seen: int,
    count: int,
    allowed: int,
) -> None: ...
def draw_token(scores: int, vocab: int, share: float) -> int: ...
def best_token(scores: int, vocab: int) -> int: ...
def likeliest_tokens(logits: int, vocab: int, count: int, token: int) -> list[tuple[int, float]]: ...
