"""Computes names by which measured operations are looked up: op, types, and other properties that time depends on."""

from __future__ import annotations

from whale.ir.program import Node, Program
from whale.ir.values import DType

_IGNORED = frozenset(
    """T Tidx Tshape Tperm Tmultiples Tpaddings Index Tindices Tparams Taxis Tlabels Tdim dtype out_type DstT SrcT N
    explicit_paddings use_cudnn_on_gpu dilations validate_indices batch_dims use_locking _class container shared_name
    half_pixel_centers Truncate bad_indices_policy ellipsis_mask new_axis_mask Tnumsegments validate_shape
    _XlaMustCompile shape num_split _output_shapes grad_a grad_b _user_specified_name""".split()
)
_LARGEST_CONSTANT = 8  # elements; larger ones are data


def dtype_of(text: str) -> str:
    """Returns the dtype of an operation's first result, parsed from its signature."""
    return text.partition(") -> ")[2].partition("[")[0]


def signature(program: Program, node: Node) -> str:
    """Returns a text that is equal for operations that take equal time.

    It consists of op, operand types (or the values of small integer constants), result types and attributes.
    """
    operands = []
    for ref in node.inputs:
        t = program.find_type(ref)
        text = str(t)
        variable = program.variable_of.get(ref.node)
        if variable is not None:
            text = f"variable {variable.type}"
        elif t.dtype.startswith("int") and t.elements <= _LARGEST_CONSTANT:
            value = program.const(ref)
            if value is not None:
                text = "=" + ",".join(str(v) for v in value.reshape(-1).tolist())
        operands.append(text)
    attrs = []
    for key in sorted(node.attrs):
        if key in _IGNORED or key.startswith("_"):
            continue
        value = node.attrs[key]
        if isinstance(value, (bool, int, float, str)) and not isinstance(value, DType) and value not in ("", False):
            attrs.append(f"{key}={value}")
        elif isinstance(value, tuple) and value and all(isinstance(v, int) for v in value):
            attrs.append(f"{key}={','.join(map(str, value))}")
        elif isinstance(value, tuple) and value and all(isinstance(v, str) for v in value):
            attrs.append(f"{key}={'; '.join(value)}")
    results = ", ".join(map(str, node.outputs))
    return f"{node.op}({'; '.join(operands)}) -> {results}" + (f" {' '.join(attrs)}" if attrs else "")
