if __name__ != "spec_compile.kernels":
    raise ImportError("import spec_compile.kernels; the folder 'kernels' is mapped into the package and is not importable by itself")
