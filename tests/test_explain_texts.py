"""No public face: texts of programs that no CPU compiles, with what users see of them read off by hand.

Other compilers, and other versions, write the same things in other ways.
"""

import textwrap

import pytest

from paraxis.reports import _flops, _hlo, _lines

TABLES = """
FileNames
1 "/home/user/model.py"
2 "/home/user/train.py"

FunctionNames
1 "loss"
2 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=2}

StackFrames
"""


def program(body: str, head: str = "") -> _hlo.Program:
    return _hlo.Program(f"HloModule jit_f, num_partitions=8\n{head}\n{textwrap.dedent(body).strip()}\n")


@pytest.mark.parametrize(
    "frames",
    [
        "1 {file_location_id=2 parent_frame_id=1}\n2 {file_location_id=1 parent_frame_id=2}\n",  # one too high
        "1 {file_location_id=2}\n2 {file_location_id=1 parent_frame_id=1}\n",
    ],
)
def test_explain_reads_calls_from_tables_however_they_are_numbered(frames: str) -> None:
    read = program('%a = f32[2]{0} add(%x, %y), metadata={op_name="jit(f)/add" stack_frame_id=2}', TABLES + frames)
    assert read.frames(read.operations[0]) == [("/home/user/model.py", 7, "loss"), ("/home/user/train.py", 9, "step")]
    assert _lines.behind(read.frames(read.operations[0]))[0] == _lines.Line("/home/user/model.py", 7)


ALONG = {  # a mesh of 2 x 4: along its second axis, along its first, along all
    "{{0,1,2,3},{4,5,6,7}}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=2,'b'=4] {'b'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=8] {'a':(2)4}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=8] {'a':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=2,'b'=4] {'a'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['a'=2,'b'=4, device_ids=([4,2]T(1,0))] {'b'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "mesh['a'=2,'b'=4] {'a','b'}": ((0, 1, 2, 3, 4, 5, 6, 7),),
}


@pytest.mark.parametrize("written", ALONG)
def test_explain_reads_who_takes_part_in_each_way_to_write_it(written: str) -> None:
    read = program(f"%a = f32[2]{{0}} all-reduce(%x), channel_id=1, replica_groups={written}, to_apply=%add")
    assert read.groups(read.operations[0]) == ALONG[written]


ON_TPU = """
%gather.part (a: bf16[2,4]) -> bf16[16,4] {
  %a = bf16[2,4]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[16,4]{1,0} all-gather(%a), channel_id=5, replica_groups=[1,8]<=[8], dimensions={0}
}

%gather.rest (b: bf16[2,4]) -> bf16[16,4] {
  %b = bf16[2,4]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[16,4]{1,0} all-gather(%b), channel_id=5, replica_groups=[1,8]<=[8], dimensions={0}
}

%body (p: (s32[], bf16[2,4], s32[])) -> (s32[], bf16[2,4], s32[]) {
  %one = s32[] constant(1)
  %p = (s32[], bf16[2,4]{1,0}, s32[]) parameter(0)
  %count = s32[] get-tuple-element(%p), index=0
  %copy.1 = s32[]{:S(6)} copy(%count)
  %x = bf16[2,4]{1,0} get-tuple-element(%p), index=1
  %end = s32[] get-tuple-element(%p), index=2
  %next = s32[] add(%copy.1, %one)
  %begins = bf16[16,4]{1,0} fusion(%x), kind=kCustom, calls=%gather.part
  %goes_on = bf16[16,4]{1,0} fusion(%x), kind=kCustom, calls=%gather.rest
  ROOT %tuple.1 = (s32[], bf16[2,4]{1,0}, s32[]) tuple(%next, %x, KEPT)
}

%condition (q: (s32[], bf16[2,4], s32[])) -> pred[] {
  %q = (s32[], bf16[2,4]{1,0}, s32[]) parameter(0)
  %count.2 = s32[] get-tuple-element(%q), index=0
  %end.2 = s32[] get-tuple-element(%q), index=2
  ROOT %lt = pred[] compare(%count.2, %end.2), direction=LT
}

ENTRY %main (y: bf16[2,4]) -> bf16[2,4] {
  %y = bf16[2,4]{1,0} parameter(0)
  %two = s32[] constant(2)
  %nine = s32[] constant(9)
  %tuple.2 = (s32[], bf16[2,4]{1,0}, s32[]) tuple(%two, %y, /*index=2*/%nine)
  %while.1 = (s32[], bf16[2,4]{1,0}, s32[]) while(%tuple.2), condition=%condition, body=%body
  ROOT %done = bf16[2,4]{1,0} get-tuple-element(%while.1), index=1
}
"""


@pytest.mark.parametrize(("kept", "times", "is_certain"), [("%end", 9 - 2, True), ("%next", 1, False)])
def test_explain_reads_a_loop_s_counter_and_takes_fused_parts_for_one(kept: str, times: int, is_certain: bool) -> None:
    """As a TPU's compiler writes them, which leaves the number of turns out."""
    (gather,) = program(ON_TPU.replace("KEPT", kept)).collectives
    assert (gather.name, gather.within.times, gather.within.is_certain) == ("all-gather.1", times, is_certain)


PAIRS = {  # what GPUs' compilers write where a collective starts → its size, and the shape of what it gives
    "(f32[2,4]{1,0}, f32[16,4]{1,0}) all-gather": ("f32[16,4]", 256),
    "((f32[2,4]{1,0}, f32[3]{0}), (f32[16,4]{1,0}, f32[24]{0})) all-gather": ("(f32[16,4], f32[24])", 352),
    "((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all": ("f32[8,4]", 128),
    "((f32[16,4]{1,0}), f32[2,4]{1,0}) reduce-scatter": ("f32[2,4]", 256),
    "(f32[2,4]{1,0}, f32[2,4]{1,0}, u32[], u32[]) collective-permute": ("f32[2,4]", 32),
    "(f32[2,4]{1,0}, s4[3]{0}) all-reduce": ("(f32[2,4], s4[3])", 33),
    "f32[2,4]{1,0} ragged-all-to-all": ("f32[2,4]", 32),
}


@pytest.mark.parametrize("begins", PAIRS)
def test_explain_counts_for_an_asynchronous_collective_what_its_end_gives(begins: str) -> None:
    (gives, sent), kind = PAIRS[begins], begins.rpartition(" ")[2]
    read = program(
        f"""
        ENTRY %main (x: f32[2,4]) -> {gives} {{
          %x = f32[2,4]{{1,0}} parameter(0)
          %begin = {begins}-start(%x), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}
          ROOT %end = {gives} {kind}-done(%begin)
        }}
        """
    )
    (found,) = read.collectives
    assert (read.sent_bytes(found), found.shape, found.operands) == (sent, gives, ["x"])


# Calls of a GPU's libraries: operands, what they give, what more they say, and their work; along a dimension of 28, a
# kernel of 3 meets 27 numbers, 28 and 27.
PICTURES, KERNELS, MADE = "f32[8,28,28,16]", "f32[32,3,3,16]", "f32[8,28,28,32]"
WINDOW, MEETS = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f", 2 * 8 * 16 * 32 * (27 + 28 + 27) ** 2
GEMM = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
CALLS = {
    "__cudnn$convForward": ((PICTURES, KERNELS, MADE), WINDOW, MEETS),
    "__cudnn$convBackwardFilter": ((PICTURES, MADE, KERNELS), WINDOW, MEETS),
    "__cudnn$convBackwardInput": ((MADE, KERNELS, PICTURES), WINDOW, MEETS),
    "__cublas$gemm": (("f32[8,4]", "f32[4,16]", "f32[8,16]"), GEMM, 2 * 8 * 16 * 4),
    "lapack_spotrf_ffi": (("f32[8,8]", "f32[8,8]", "f32[8,8]"), "", 0),
}


@pytest.mark.parametrize("target", CALLS)
def test_explain_counts_or_names_what_libraries_compute(target: str) -> None:
    (left, right, gives), more, work = CALLS[target]
    read = program(
        f"""
        ENTRY %main (x: {left}, y: {right}) -> {gives} {{
          %x = {left} parameter(0)
          %y = {right} parameter(1)
          ROOT %made = ({gives}, u8[0]{{0}}) custom-call(%x, %y), {more}, custom_call_target="{target}"
        }}
        """
    )
    found, _, uncounted = _flops.of_program(read)
    assert (found.total(), uncounted) == (work, () if work else (target,))
