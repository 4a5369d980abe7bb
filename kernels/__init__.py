if __name__ != "spec_compile.kernels":
    # transformers probes for a PyPI package called "kernels" and meets this folder when it is run from a checkout.
    __version__ = "0"
