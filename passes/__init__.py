if __name__ != "spec_compile.passes":
    raise ImportError(
        "import spec_compile.passes; the folder 'passes' is mapped into the package and is not importable by itself"
    )

# Importing the modules registers the passes.
from spec_compile.passes import (
    canonicalize,
    check_rewrite,
    detect_attention,
    detect_mlp,
    detect_moe,
    fuse_linears,
    lower_attention,
    plan_reuse,
    share_mask_work,
    share_selection,
    sparsify_attention,
    sparsify_mlp,
    sparsify_moe,
)

__all__ = [
    "canonicalize",
    "check_rewrite",
    "detect_attention",
    "detect_mlp",
    "detect_moe",
    "fuse_linears",
    "lower_attention",
    "plan_reuse",
    "share_mask_work",
    "share_selection",
    "sparsify_attention",
    "sparsify_mlp",
    "sparsify_moe",
]
