"""The rules of which ONNX Runtime's two rule-based optimisers consist.

They stand here because the log names the sets only, and not the rule that applied.
`disabled_optimizers` takes the names of rules too, and ignores names that it does not have: a rule
that a version lacks does no harm here, and one that is missing here leaves the name of the set.
"""

from __future__ import annotations

from collections.abc import Mapping

RULES: Mapping[str, tuple[str, ...]] = {
    "Level1_RuleBasedTransformer": (
        "EliminateIdentity", "EliminateSlice", "UnsqueezeElimination", "EliminateDropout",
        "ExpandElimination", "CastElimination", "CastChainElimination", "PreShapeNodeElimination",
        "NoopElimination", "DivMulFusion", "FuseReluClip", "GemmSumFusion", "GemmTransposeFusion",
        "NotWhereFusion", "ConvAddFusion", "ConvMulFusion", "ConvBNFusion", "Pad_Fusion",
        "MatMul_BatchNormalization_Fusion", "LabelEncoderFusion",
    ),
    "Level2_RuleBasedTransformer": (
        "ClipQuantRewrite", "ReluQuantRewrite", "GemmTransposeFusion",
    ),
}  # fmt: skip
