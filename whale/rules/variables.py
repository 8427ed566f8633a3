"""Variables: every rank holds the whole value and applies the same update, so all operands and results are whole."""

from __future__ import annotations

from whale.rules.notation import REPLICATED
from whale.rules.registry import rule

_OPTIMIZERS = ("AdaMax Adadelta Adagrad AdagradDA AdagradV2 Adam AddSign CenteredRMSProp Ftrl FtrlV2 GradientDescent "
               "Momentum PowerSign ProximalAdagrad ProximalGradientDescent RMSProp").split()  # fmt: skip
_SPARSE = ("Adadelta Adagrad AdagradDA AdagradV2 CenteredRMSProp Ftrl FtrlV2 Momentum ProximalAdagrad "
           "ProximalGradientDescent RMSProp").split()  # fmt: skip
_SCATTERS = "Add Sub Mul Div Max Min Update NdAdd NdSub NdMax NdMin NdUpdate".split()


def _named(prefix: str, stems: list[str]) -> str:
    return " ".join(prefix + s for s in stems)


RULES = (
    rule(
        "VarHandleOp ReadVariableOp AssignVariableOp AssignAddVariableOp AssignSubVariableOp VarIsInitializedOp "
        "VariableShape DestroyResourceOp ResourceCountUpTo ResourceStridedSliceAssign DisableCopyOnRead "
        "IsVariableInitialized CountUpTo _VarHandlesOp _ReadVariablesOp",
        REPLICATED,
    ),
    rule(
        "Variable VariableV2 TemporaryVariable DestroyTemporaryVariable Assign AssignAdd AssignSub StridedSliceAssign",
        REPLICATED,
    ),
    rule(_named("ResourceApply", [*_OPTIMIZERS, "AdamWithAmsgrad", "KerasMomentum"]), REPLICATED),
    rule(_named("Apply", _OPTIMIZERS), REPLICATED),
    rule(_named("ResourceSparseApply", [*_SPARSE, "KerasMomentum"]), REPLICATED),
    rule(_named("SparseApply", _SPARSE), REPLICATED),
    rule(_named("ResourceScatter", _SCATTERS), REPLICATED),
    rule(_named("Scatter", _SCATTERS), REPLICATED),
)
