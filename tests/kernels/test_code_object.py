"""Reading code objects: the containers byte by byte, loops in three assemblies, and what kernels promise."""

import dataclasses
import struct
from typing import Any

import pytest

from nstf.errors import CorruptError
from nstf.kernels.triton.architecture import architecture
from nstf.kernels.triton.assembly import Counts, main_loop, whole
from nstf.kernels.triton.code_object import CodeReport, Expected, emulated, inspect, misses
from nstf.kernels.triton.elf import amd_metadata, cuda_resources

ENTRY = {
    ".name": "k",
    ".vgpr_count": 76,
    ".agpr_count": 4,
    ".sgpr_count": 300,
    ".vgpr_spill_count": 0,
    ".sgpr_spill_count": 0,
    ".private_segment_fixed_size": 0,
    ".group_segment_fixed_size": 0,
}


def packed(value: Any) -> bytes:
    """MessagePack, as LLVM writes it."""
    if isinstance(value, bool) or value is None:
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        if -32 <= value < 128:
            return struct.pack("b", value) if value < 0 else bytes([value])
        return b"\xcd" + struct.pack(">H", value) if value < 1 << 16 else b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xd9" + bytes([len(raw)])) + raw
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(packed, value))
    head = bytes([0x80 | len(value)]) if len(value) < 16 else b"\xde" + struct.pack(">H", len(value))
    return head + b"".join(packed(k) + packed(v) for k, v in value.items())


def elf(segments: list[tuple[int, bytes]] = [], sections: list[tuple[str, bytes]] = []) -> bytes:  # noqa: B006
    """A 64-bit ELF file with these program headers' contents and these sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in sections) + b".names\0"
    rows = [*sections, (".names", names)] if sections else []
    at = 64 + 56 * len(segments)
    body, program, table = b"", b"", b""
    for kind, content in segments:
        program += struct.pack("<IIQQQQQQ", kind, 0, at + len(body), 0, 0, len(content), 0, 4)
        body += content
    for name, content in rows:
        where = names.find(b"\0" + name.encode() + b"\0") + 1
        table += struct.pack("<IIQQQQIIQQ", where, 1, 0, 0, at + len(body), len(content), 0, 0, 4, 0)
        body += content
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + struct.pack("<HHIQQQ", 3, 224, 1, 0, 64, at + len(body))
    head += struct.pack("<IHHHHHH", 0, 64, 56, len(segments), 64, len(rows), max(0, len(rows) - 1))
    return head + program + body + table


def hsaco(content: Any, name: bytes = b"AMDGPU\0", kind: int = 32) -> bytes:
    data = packed(content)
    note = struct.pack("<III", len(name), len(data), kind) + name + b"\0" * (-len(name) % 4)
    return elf([(1, b"code"), (4, note + data + b"\0" * (-len(data) % 4))])


def test_the_metadata_note_is_read() -> None:
    content = {
        "amdhsa.kernels": [ENTRY],
        "amdhsa.version": [1, 2],
        "big": 1 << 40,
        "x" * 40: [None, True, -3],
    }
    assert amd_metadata(hsaco(content)) == content


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a 64-bit little-endian ELF"),
        (b"\x7fELF\x01\x01" + b"\0" * 60, "not a 64-bit little-endian ELF"),
        (elf([(4, b"")]), "no AMDGPU metadata note"),
        (hsaco({}, name=b"GNU\0"), "no AMDGPU metadata note"),
        (hsaco({}, kind=1), "no AMDGPU metadata note"),
        (hsaco([[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]), "nested more than 16 deep"),
        (hsaco({"a": 1})[:-3], "lie outside"),
        (elf([(4, struct.pack("<III", 7, 1 << 30, 32) + b"AMDGPU\0\0")]), "lie outside"),
    ],
)
def test_a_damaged_code_object_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        amd_metadata(data)


def test_a_cubin_states_registers_and_stack() -> None:
    info = struct.pack("<BBHII", 4, 0x2F, 8, 5, 76) + struct.pack("<BBHII", 4, 0x11, 8, 5, 24)
    info = struct.pack("<BBH", 3, 0x50, 0) + info + struct.pack("<BBHII", 4, 0x2F, 8, 6, 40)
    assert cuda_resources(elf(sections=[(".text", b"x"), (".nv.info", info)])) == (76, 24)
    with pytest.raises(CorruptError, match="no register count"):
        cuda_resources(elf(sections=[(".nv.info", b"")]))


AMD = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
k:                                      ; @k
	s_load_dwordx4 s[4:7], s[0:1], 0x10
	global_load_dwordx4 v[0:3], v4, s[4:5]
.LBB0_1:                                ; a small loop before
	v_add_u32_e32 v1, 1, v1
	s_cbranch_scc1 .LBB0_1
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
	.loc	1 16 30 is_stmt 1               ; probe.py:16:30
	buffer_load_dwordx4 v[62:65], v4, s[24:27], 0 offen
	buffer_load_dwordx4 v[66:69], v4, s[24:27], 0 offen offset:16
	buffer_load_ushort v24, v70, s[4:7], 0 offen
	ds_read_b128 v[0:3], v9
	ds_read2_b64 v[4:7], v9 offset1:4
	s_waitcnt vmcnt(0) lgkmcnt(0)
	s_barrier
	v_and_b32_e32 v1, 15, v2            ; a comment ; with another
	v_pk_fma_f16 v3, v1, v2, v3
	v_dual_mov_b32 v7, 0 :: v_dual_and_b32 v90, 0x60, v0
	v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_add_i32 s2, s2, 1
	s_cbranch_scc1 .LBB0_2
; %bb.6:
	global_store_dwordx4 v4, v[0:3], s[4:5]
	s_endpgm
	.amdhsa_next_free_vgpr 76
"""


def test_the_loop_of_amd_assembly_is_counted() -> None:
    assert main_loop(AMD) == Counts(
        instructions=13,
        vector=3,
        scalar=2,
        matrix=1,
        matrix_kinds=("v_mfma_f32_16x16x16_f16",),
        loads={2: 1, 16: 2},
        local_reads={16: 2},
        full_waits=1,
        barriers=1,
        is_loop=True,
        streams=({16: 2}, {2: 1}),
    )
    assert whole(AMD).loads == {2: 1, 16: 3} and not whole(AMD).is_loop


SASS = """
	.section	.text.gemm,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR8][R2.64] ;
.L_x_2:
        /*0330*/                   LDGSTS.E.BYPASS.128 [R65], desc[UR8][R2.64], P3 ;
        /*0530*/                   LDG.E.U8.CONSTANT R9, desc[UR8][R8.64] ;
        /*0540*/              @!P2 LDG.E.64 R10, desc[UR8][R8.64] ;
        /*0550*/                   LDSM.16.M88.4 R12, [R9] ;
        /*0560*/                   LOP3.LUT R0, R0, UR4, RZ, 0xfc, !PT ;
        /*0570*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*0580*/                   HMMA.16816.F32 R36, R28, R40, R36 ;
        /*0590*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*1e50*/              @!P2 BRA `(.L_x_2) ;
        /*1e60*/                   STG.E.128 desc[UR8][R2.64], R4 ;
.L_x_3:
        /*21c0*/                   BRA `(.L_x_3);
"""
PTX = """
.visible .entry gemm(
$L__BB0_2:
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	@%p1 ld.global.v2.b32 { %r3, %r4 }, [ %rd2 + 0 ];
	and.b32 	%r5, %r3, 15;
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %f1 }, { %r1 }, { %r2 }, { %f1 };
	@%p2 bra 	$L__BB0_2;
	ret;
"""


def test_the_loops_of_sass_and_ptx_are_counted() -> None:
    sass, ptx = main_loop(SASS), main_loop(PTX)
    assert (sass.matrix, sass.vector, sass.scalar, sass.barriers, sass.is_loop) == (1, 1, 1, 1, True)
    assert sass.loads == {1: 1, 8: 1, 16: 1} and sass.local_reads == {16: 1}
    assert (ptx.matrix, ptx.vector, ptx.is_loop) == (1, 1, True) and ptx.loads == {8: 1, 16: 1}


def test_a_kernel_without_a_loop_is_counted_whole() -> None:
    text = '\t.amdgcn_target "x"\nk:\n\tv_add_u32_e32 v1, 1, v1\n\tglobal_load_dword v1, v2, s[0:1]\n\ts_endpgm\n'
    assert main_loop(text) == Counts(instructions=3, vector=1, loads={4: 1})


def test_a_report_comes_from_note_assembly_and_metadata() -> None:
    asm = {"hsaco": hsaco({"amdhsa.kernels": [ENTRY]}), "amdgcn": AMD, "ttir": "f8E4M3FN"}
    report = inspect(asm, {"name": "k", "num_warps": 4, "shared": 20480}, "gfx942")
    assert (report.vector_registers, report.accumulation_registers, report.scalar_registers) == (76, 4, 300)
    assert report.lds_bytes == 20480 and report.occupancy.limit == "lds" and report.listing == "amdgcn"
    assert report.emulated == ("f8E4M3FN",) and report.loop.matrix == 1
    # 3 instructions of 4 waves of 64 lanes.
    assert report.vector_per_weight(256) == 3.0
    with pytest.raises(CorruptError, match="2 kernels inside"):
        inspect(
            asm | {"hsaco": hsaco({"amdhsa.kernels": [ENTRY, ENTRY]})},
            {"num_warps": 4, "shared": 0},
            "gfx942",
        )


@pytest.mark.parametrize(
    ("target", "text", "found"),
    [
        ("gfx942", "!tt.ptr<f8E4M3FN>", ("f8E4M3FN",)),
        ("gfx942", "tensor<1xf8E4M3FNUZ>", ()),
        ("gfx950", "tensor<1xf8E4M3FNUZ>", ("f8E4M3FNUZ",)),
        ("gfx1201", "f8E4M3FN f8E5M2", ()),
        ("gfx1100", "f8E5M2", ("f8E5M2",)),
        ("gfx950", "tt.dot_scaled", ()),
        ("gfx942", "%1 = arith.subf %a, %b : tensor<64x32xbf16> loc(#1)", ("bf16 arithmetic",)),
        ("gfx942", "%1 = arith.mulf %a, %b : bf16", ("bf16 arithmetic",)),
        ("gfx942", "%1 = arith.subf %a, %b : tensor<64xf32>\n%2 = arith.truncf %1 : f32 to bf16", ()),
        ("sm_90", "%1 = arith.subf %a, %b : tensor<64xbf16>", ()),
        ("sm_90", "tt.dot_scaled f8E4M3FN", ("dot_scaled",)),
    ],
)
def test_formats_that_a_target_would_emulate_are_found(
    target: str, text: str, found: tuple[str, ...]
) -> None:
    assert emulated(text, architecture(target)) == found


def good() -> tuple[CodeReport, Expected]:
    asm = {"hsaco": hsaco({"amdhsa.kernels": [ENTRY]}), "amdgcn": AMD}
    report = inspect(asm, {"name": "k", "num_warps": 4, "shared": 0}, "gfx942")
    return report, Expected(matrix=True, weights=256, weight_bytes=8192, vector_per_weight=3.0)


def test_a_good_kernel_breaks_no_promise() -> None:
    assert misses(*good()) == []


@pytest.mark.parametrize(
    ("changes", "loop", "expected", "message"),
    [
        ({"vector_spills": 2}, {}, {}, "spills 2 vector and 0 scalar registers"),
        ({"scalar_spills": 1}, {}, {}, "spills 0 vector and 1 scalar"),
        ({"scratch_bytes": 8}, {}, {}, "8 bytes of scratch"),
        ({"lds_bytes": 70000}, {}, {}, "70000 bytes of local memory; a workgroup has 65536"),
        ({"emulated": ("f8E5M2",)}, {}, {}, "emulates f8E5M2"),
        ({}, {"matrix": 0}, {}, "no matrix instruction"),
        ({}, {"loads": {8: 4}}, {}, "no load of 16 bytes in its loop; the widest has 8"),
        ({}, {"loads": {}}, {}, "the widest has 0"),
        (
            {},
            {"loads": {16: 1}},
            {},
            "4096 bytes of an iteration come in loads of 16 bytes; its weights have 8192",
        ),
        # Enough wide loads, but they are the activations': the weights' own array comes in pieces of 8 bytes.
        ({}, {"loads": {8: 4, 16: 2}, "streams": ({8: 4}, {16: 2, 4: 1})}, {}, "no array of 8192 bytes"),
        ({}, {"vector": 4}, {}, "4.00 vector instructions for each weight; at most 3"),
    ],
)
def test_every_broken_promise_is_named(changes: dict, loop: dict, expected: dict, message: str) -> None:
    report, wanted = good()
    report = dataclasses.replace(report, **changes, loop=dataclasses.replace(report.loop, **loop))
    found = misses(report, dataclasses.replace(wanted, **expected))
    assert len(found) == 1 and message in found[0]
